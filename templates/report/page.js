"use strict";
window.addEventListener("error", (event) => { document.documentElement.dataset.error = event.message; });

for (const table of document.querySelectorAll("table.sortable")) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    heading.tabIndex = 0;
    const sort = () => {
      const up = heading.getAttribute("aria-sort") !== "ascending";
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = (row) => row.cells[column].dataset.v ?? row.cells[column].textContent;
      const order = (a, b) => {
        const [x, y] = [Number(key(a)), Number(key(b))];
        return Number.isNaN(x) || Number.isNaN(y) ? key(a).localeCompare(key(b)) : x - y;
      };
      const rows = [...table.tBodies[0].rows].sort((a, b) => (up ? order(a, b) : order(b, a)));
      table.tBodies[0].append(...rows);
    };
    heading.addEventListener("click", sort);
    heading.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
  });
}

// The page checks its own charts, so that tests find a broken one.
const faults = [];
for (const drawing of document.querySelectorAll("svg")) {
  const name = drawing.getAttribute("aria-label");
  if (/NaN|Infinity|undefined/.test(drawing.innerHTML)) faults.push(`${name}: a coordinate is not a number`);
  const box = drawing.hasAttribute("viewBox") ? drawing.viewBox.baseVal : drawing.getBoundingClientRect();
  const labels = [];
  for (const part of drawing.querySelectorAll("circle, path, rect, line, text")) {
    const { x, y, width, height } = part.getBBox();
    if (x < -1 || y < -1 || x + width > box.width + 1 || y + height > box.height + 1) faults.push(`${name}: drawn outside`);
    if (part.tagName === "text") labels.push({ x, y, width, height, text: part.textContent });
  }
  labels.forEach((a, place) => {
    const meets = (b) => a.x < b.x + b.width && b.x < a.x + a.width && a.y < b.y + b.height && b.y < a.y + a.height;
    const over = labels.slice(place + 1).find(meets);
    if (over) faults.push(`${name}: ${a.text} overlaps ${over.text}`);
  });
}
if (document.documentElement.scrollWidth > document.documentElement.clientWidth + 1) faults.push("wider than the window");
document.documentElement.dataset.checked = faults.length ? faults[0] : "well";
