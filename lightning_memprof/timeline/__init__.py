"""One timeline of many sources: traces and ready events, normalised, on one time base, in one file."""
