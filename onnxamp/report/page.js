"use strict";
// Theme: the system's choice until the button is used; remembered where storage is allowed.
(() => {
  const root = document.documentElement, key = "onnxamp-theme";
  let saved = null;
  try { saved = localStorage.getItem(key); } catch { /* file pages may have no storage */ }
  const system = matchMedia("(prefers-color-scheme: dark)");
  const set = (dark) => { root.dataset.theme = dark ? "dark" : "light"; };
  set(saved ? saved === "dark" : system.matches);
  system.addEventListener("change", (event) => { if (!saved) set(event.matches); });
  document.getElementById("theme").addEventListener("click", () => {
    saved = root.dataset.theme === "dark" ? "light" : "dark";
    set(saved === "dark");
    try { localStorage.setItem(key, saved); } catch { /* not remembered */ }
  });
})();

// Tables: sort by a column, show all rows.
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  const value = (row, k) => row.cells[k].dataset.v ?? row.cells[k].textContent;
  const sort = (head) => {
    const k = head.cellIndex, down = head.getAttribute("aria-sort") === "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const rows = [...body.rows], shown = rows.filter((row) => !row.hidden).length;
    const numeric = rows.some((row) => row.cells[k].dataset.v !== undefined);
    rows.sort((a, b) => {
      const x = value(a, k), y = value(b, k);
      const order = numeric ? (Number(x) || 0) - (Number(y) || 0) : x.localeCompare(y, undefined, { numeric: true });
      return down ? -order : order;
    });
    rows.forEach((row, i) => { row.hidden = i >= shown; });
    body.append(...rows);
  };
  for (const head of table.tHead.rows[0].cells) {
    head.addEventListener("click", () => sort(head));
    head.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sort(head); }
    });
  }
}
for (const more of document.querySelectorAll("button.more")) {
  more.addEventListener("click", () => {
    for (const row of more.parentElement.querySelectorAll("tr[hidden]")) row.hidden = false;
    more.remove();
  });
}

// Plots: a cursor and the numbers under it.
for (const box of document.querySelectorAll(".plotbox")) {
  const data = JSON.parse(box.dataset.plot), svg = box.querySelector("svg"), cursor = svg.querySelector(".cursor");
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  box.append(tip);
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) { const mid = (low + high) >> 1; if (xs[mid] < x) low = mid; else high = mid; }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  };
  const show = (event) => {
    const area = svg.getBoundingClientRect(), scale = data.width / area.width;
    const px = Math.min(Math.max((event.clientX - area.left) * scale, data.left), data.right);
    const x = data.x0 + (px - data.left) / (data.right - data.left) * (data.x1 - data.x0);
    tip.replaceChildren();
    let at = null;
    for (const series of data.series) {
      if (!series.x.length) continue;
      const i = nearest(series.x, x);
      at ??= series.x[i];
      const row = document.createElement("div"), y = series.y[i];
      row.textContent = `${series.name}: ${typeof y === "number" ? Number(y.toPrecision(6)) : y}${series.x[i] === at ? "" : ` (at ${Number(series.x[i].toPrecision(6))})`}`;
      tip.append(row);
    }
    if (at === null) return;
    const head = document.createElement("b");
    head.textContent = `${data.label} ${at}`;
    tip.prepend(head);
    tip.hidden = false;
    const left = px / scale;
    tip.style.left = `${left > area.width / 2 ? left - tip.offsetWidth - 10 : left + 10}px`;
    tip.style.top = "8px";
    for (const [name, v] of [["x1", px], ["x2", px], ["y1", data.top], ["y2", data.bottom]]) cursor.setAttribute(name, v);
    cursor.style.strokeWidth = 1;
  };
  box.addEventListener("pointermove", show);
  box.addEventListener("pointerleave", () => { tip.hidden = true; cursor.style.strokeWidth = 0; });
}
