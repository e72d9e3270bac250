// Chooses between the original page, which loads a script from another host, and the local page.
// It requests that same script, which the page then reads from the cache of the browser. Timeout of 3 s: a network that
// drops packets reports no error for minutes, and a slower host would delay the page.
'use strict';

(async () => {
  const {script} = document.documentElement.dataset;
  let reached = false;
  if (navigator.onLine) {
    try {
      await fetch(script, {mode: 'no-cors', credentials: 'omit', signal: AbortSignal.timeout(3000)});
      reached = true;
    } catch {
      // Unknown host, refused or timed out: use the local page.
    }
  }
  const page = new URL(location.href);
  page.searchParams.set('scripts', reached ? 'cdn' : 'local');
  location.replace(page);
})();
