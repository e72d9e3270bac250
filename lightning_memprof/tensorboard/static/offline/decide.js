// Which page is shown: the one that loads a script of another host, or ours that does without.
// It asks for that very script, so that the page finds it in the browser's cache. Three seconds, as networks that drop
// what they do not pass give no error for minutes, and a host that serves less than 100 kB later than that is no help.
'use strict';

(async () => {
  const {script} = document.documentElement.dataset;
  let reached = false;
  if (navigator.onLine) {
    try {
      await fetch(script, {mode: 'no-cors', credentials: 'omit', signal: AbortSignal.timeout(3000)});
      reached = true;
    } catch {
      // No such host, refused, or too late: it is all the same.
    }
  }
  const page = new URL(location.href);
  page.searchParams.set('scripts', reached ? 'cdn' : 'local');
  location.replace(page);
})();
