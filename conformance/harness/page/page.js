"use strict";
// Search and filters over a page that is complete without them. Nothing is asked of any other place.
const rows = [...document.querySelectorAll("[data-outcomes]")];
const texts = rows.map((row) => row.textContent.toLowerCase());
const search = document.getElementById("search");
const outcome = document.getElementById("outcome");
const stem = document.getElementById("stem");
const form = document.getElementById("filter");

function apply() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  const wanted = outcome.value.split(" ").filter(Boolean);
  let shown = 0;
  rows.forEach((row, index) => {
    const outcomes = row.dataset.outcomes.split(" ");
    const fits =
      words.every((word) => texts[index].includes(word)) &&
      (!wanted.length || wanted.some((one) => outcomes.includes(one))) &&
      (!stem.value || row.dataset.stem === stem.value);
    row.hidden = !fits;
    shown += fits;
  });
  const isFiltered = Boolean(words.length || wanted.length || stem.value);
  // Headings over nothing would only be scrolled past.
  for (const part of document.querySelectorAll(".area, .group")) {
    part.hidden = isFiltered && !part.querySelector("[data-outcomes]:not([hidden])");
  }
  for (const title of document.querySelectorAll("h3.stem")) {
    title.hidden = isFiltered && !document.querySelector(`.area[data-stem="${CSS.escape(title.dataset.stem)}"]:not([hidden])`);
  }
  document.getElementById("shown").value = isFiltered ? `${shown} of ${rows.length} shown` : "";
}

form.hidden = false;
form.addEventListener("submit", (event) => event.preventDefault());
for (const control of [search, outcome, stem]) {
  control.addEventListener("input", apply);
}
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !/^(INPUT|SELECT)$/.test(document.activeElement.tagName)) {
    event.preventDefault();
    search.focus();
  } else if (event.key === "Escape" && document.activeElement === search) {
    search.value = "";
    apply();
  }
});
// A print has every failure whole, also where details cannot be opened by a style.
let closed = [];
window.addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("details:not([open])")];
  closed.forEach((details) => (details.open = true));
});
window.addEventListener("afterprint", () => closed.forEach((details) => (details.open = false)));
// Browsers keep what was typed when a page is loaded again.
apply();
