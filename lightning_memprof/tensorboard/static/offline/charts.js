// The names of the Google Charts API.
'use strict';

window.google = {
  charts: {
    load: async () => {},
    setOnLoadCallback: call => setTimeout(call),
  },
  visualization: window.memprofCharts,
};
