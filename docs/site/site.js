// In a search, dated notes come last.
if (typeof Scorer !== "undefined")
  Scorer.score = ([page, , , , score]) => (page.startsWith("docs/notes/") ? score - 100 : score);
