// The names under which a page asks for Google Charts.
'use strict';

window.google = {
  charts: {
    load: async () => {},
    setOnLoadCallback: call => setTimeout(call),
  },
  visualization: window.memprofCharts,
};
