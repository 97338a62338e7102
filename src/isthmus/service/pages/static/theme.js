// Before anything is painted: the colours this reader chose last time.
"use strict";
(() => {
  let chosen = null;
  try { chosen = localStorage.getItem("isthmus-theme"); } catch { /* storage may be forbidden */ }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
