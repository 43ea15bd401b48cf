// The graph view: draws the levels that are open, opens folds and bodies in place, searches, and shows a node's facts.
(async () => {
  const SVG = "http://www.w3.org/2000/svg", GAP = 24, ROW = 34, PAD = 14, HEAD = 26;
  const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (c) => c.charCodeAt(0));
  const all = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
  const short = { fp32: "32", fp16: "16", bf16: "b16" };
  const marks = { added: "+", removed: "−", changed: "≠", retyped: "↻" };
  const el = (tag, attributes = {}, text = "") => {
    const node = document.createElementNS(SVG, tag);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    if (text !== "") node.textContent = text;
    return node;
  };
  const html = (tag, attributes = {}, text = "") => {
    const node = document.createElement(tag);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    if (text !== "") node.textContent = text;
    return node;
  };
  const clip = (text, room) => {       // keeps the end, which tells names apart
    const most = Math.max(3, Math.floor(room));
    return text.length > most ? "…" + text.slice(1 - most) : text;
  };
  const cut = (text, room) => {        // keeps the beginning
    const most = Math.max(3, Math.floor(room));
    return text.length > most ? text.slice(0, most - 1) + "…" : text;
  };

  function view(root, data) {
    const strings = data.strings, open = new Set();
    let scale = 1, current = null, byHeat = false;
    const shown = new Map();      // item -> {x, y, w, h} in drawing coordinates
    const parents = new Map();    // item -> item that it lies in, or null
    const byId = new Map();
    const boxes = [];
    const levelsOf = (item) => item.level ? [["", item.level]] : (item.bodies || []).map(([n, l]) => [strings[n], l]);
    const stack = [[data.graph, null]];
    let heated = false;
    while (stack.length) {
      const [level, parent] = stack.pop();
      for (const item of level.items) {
        parents.set(item, parent);
        if (!item.fold) { item.id ??= item.name; boxes.push(item); byId.set(item.id, item); heated ||= item.heat !== undefined; }
      }
      for (let k = level.items.length - 1; k >= 0; k--) {
        for (const [, inner] of levelsOf(level.items[k]).reverse()) stack.push([inner, level.items[k]]);
      }
    }
    const order = new Map(boxes.map((box, k) => [box, k]));

    // Frame
    const bar = html("div", { class: "toolbar" });
    const search = html("input", { type: "search", placeholder: "Search names, operators, codes  ( / )", "aria-label": "Search" });
    const hits = html("div", { class: "hits", role: "listbox" });
    hits.hidden = true;
    const button = (text, title, action) => {
      const made = html("button", { title, type: "button" }, text);
      made.addEventListener("click", action);
      bar.append(made);
      return made;
    };
    const box = html("div", { class: "searchbox" });
    box.append(search, hits);
    bar.append(box);
    button("◀", "Previous difference (p)", () => step(-1));
    button("▶ difference", "Next difference (n)", () => step(1));
    button("Open", "Open folds, one depth more", () => deeper());
    button("Fold", "Close all folds", () => { open.clear(); draw(); home(); });
    button("−", "Smaller (-)", () => zoom(scale / 1.25));
    button("+", "Larger (+)", () => zoom(scale * 1.25));
    button("Fit", "Fit the width (0)", () => fit());
    if (heated) button("Colour: precision", "Colour by precision or by error", (event) => {
      byHeat = !byHeat;
      event.currentTarget.textContent = byHeat ? "Colour: error" : "Colour: precision";
      scaleKey.hidden = !byHeat;
      draw();
    });
    const legend = html("div", { class: "legend hintbar" });
    for (const [kind, text] of [["fp32", "32 fp32"], ["fp16", "16 fp16"], ["bf16", "b16 bf16"], ["other", "no floats"],
      ["cast", "Cast"], ["island", "fp32 island"], ["added", "+ added"], ["removed", "− removed"]]) {
      legend.append(html("span", { class: `swatch ${kind}` }, text));
    }
    const scaleKey = html("span", { class: "scale" });
    scaleKey.hidden = true;
    scaleKey.append(html("span", {}, "error: least "), ...[0, 0.25, 0.5, 0.75, 1].map((v) => {
      const patch = html("i");
      patch.style.background = `hsl(${210 - 200 * v} ${30 + 55 * v}% var(--heat))`;
      return patch;
    }), html("span", {}, " most"));
    legend.append(scaleKey);
    const body = html("div", { class: "graphbody" });
    const pane = html("div", { class: "pane", tabindex: "0", role: "application",
      "aria-label": "Graph. Arrow keys move along edges, Enter opens a fold, n and p go to differences." });
    const svg = el("svg");
    const side = html("aside", { class: "side", "aria-live": "polite" });
    pane.append(svg);
    body.append(pane, side);
    root.append(bar, legend, body);

    // Geometry: every item's size follows from what is open in it.
    const measure = (item, planned) => {
      if (!open.has(item)) return { w: planned, h: item.fold ? 46 : item.cast ? 24 : item.io ? 26 : 44, parts: [] };
      const parts = levelsOf(item).map(([name, level]) => ({ name, ...arrange(level) }));
      return {
        w: Math.max(planned, ...parts.map((p) => p.w + 2 * PAD)),
        h: HEAD + parts.reduce((sum, p) => sum + p.h + PAD + (p.name ? 18 : 0), 0),
        parts,
      };
    };
    // Centres nearest to the wished ones without overlap (pool adjacent violators).
    const place = (wish, widths) => {
      const offset = [], blocks = [];
      let at = 0;
      widths.forEach((w, k) => { if (k) at += (widths[k - 1] + w) / 2 + GAP; offset.push(at); });
      wish.forEach((x, k) => {
        let mean = x - offset[k], n = 1;
        while (blocks.length && blocks[blocks.length - 1][0] >= mean) {
          const [other, m] = blocks.pop();
          mean = (mean * n + other * m) / (n + m);
          n += m;
        }
        blocks.push([mean, n]);
      });
      const centers = [];
      for (const [mean, n] of blocks) for (let k = 0; k < n; k++) centers.push(mean + offset[centers.length]);
      return centers;
    };
    const arrange = (level) => {
      const sizes = level.items.map((item, k) => measure(item, level.widths[k]));
      const spots = new Array(level.x.length);
      const heights = level.rows.map((row) => Math.max(10, ...row.map((k) => sizes[k]?.h ?? 0)));
      let y = 0, left = Infinity, right = 0;
      level.rows.forEach((row, r) => {
        const widths = row.map((k) => sizes[k]?.w ?? 14);
        const centers = place(row.map((k) => level.x[k]), widths);
        row.forEach((k, i) => {
          spots[k] = { x: centers[i], y: y + (heights[r] - (sizes[k]?.h ?? 0)) / 2, w: widths[i], h: sizes[k]?.h ?? 0, row: y, rowHeight: heights[r] };
          left = Math.min(left, centers[i] - widths[i] / 2);
          right = Math.max(right, centers[i] + widths[i] / 2);
        });
        y += heights[r] + ROW;
      });
      if (left === Infinity) left = 0;
      for (const spot of spots) if (spot) spot.x -= left;
      return { level, sizes, spots, w: Math.max(0, right - left), h: Math.max(0, y - ROW) };
    };

    const drawLevel = (plan, x0, y0, target) => {
      const edges = el("g", { class: "edges" }), nodes = el("g");
      target.append(edges, nodes);
      for (const [a, b, label, precision, route] of plan.level.edges) {
        const from = plan.spots[a], to = plan.spots[b];
        if (!from || !to) continue;
        const points = [[from.x, from.y + from.h]];
        for (const k of route) { const s = plan.spots[k]; points.push([s.x, s.row], [s.x, s.row + s.rowHeight]); }
        points.push([to.x, to.y]);
        let d = `M${x0 + points[0][0]} ${y0 + points[0][1]}`;
        for (let k = 1; k < points.length; k++) {
          const [px, py] = points[k - 1], [qx, qy] = points[k];
          if (route.length && k % 2 === 0) d += `L${x0 + qx} ${y0 + qy}`;
          else {
            const bend = Math.max(12, Math.abs(qy - py) / 2);
            d += `C${x0 + px} ${y0 + py + bend} ${x0 + qx} ${y0 + qy - bend} ${x0 + qx} ${y0 + qy}`;
          }
        }
        const path = el("path", { d, class: `edge ${precision}` });
        path.append(el("title", {}, strings[label]));
        edges.append(path);
      }
      plan.level.items.forEach((item, k) => {
        const spot = plan.spots[k];
        if (spot) drawItem(item, plan.sizes[k], x0 + spot.x - spot.w / 2, y0 + spot.y, nodes);
      });
    };
    // What enters and leaves an open fold goes through one point of its upper and one of its lower border.
    const border = (plan, x0, y0, x, top, bottom, target) => {
      const count = plan.level.items.length;
      [[count, top, 0], [count + 1, bottom, 1]].forEach(([k, y, end]) => {
        const spot = plan.spots[k];
        if (!spot) return;
        const kinds = new Set(plan.level.edges.filter((edge) => edge[end] === k).map((edge) => edge[3]));
        const px = x0 + spot.x, py = y0 + spot.y, bend = (y - py) / 2;
        target.append(el("path", { d: `M${px} ${py}C${px} ${py + bend} ${x} ${y - bend} ${x} ${y}`, class: `edge ${kinds.size === 1 ? [...kinds][0] : ""}` }),
          el("circle", { cx: px, cy: py, r: 3, class: "through" }));
      });
    };
    const heat = (value) => `hsl(${Math.round(210 - 200 * value)} ${Math.round(30 + 55 * value)}% var(--heat))`;
    const drawItem = (item, size, x, y, target) => {
      shown.set(item, { x, y, w: size.w, h: size.h });
      const kind = item.p && item.p.includes("/") ? "mixed" : item.p || (item.fold ? item.s === "mixed" ? "mixed" : "other" : "other");
      const names = ["item", kind, item.s || "same", item.cast ? "cast" : "", item.island ? "island" : "", item.fold ? "fold" : "",
        open.has(item) ? "open" : "", item === current ? "current" : ""];
      const op = item.fold ? `${item.fold.toLocaleString("en")} nodes` : strings[item.op];
      const was = item.b ? `, was ${item.b}` : "";
      const g = el("g", { class: names.filter(Boolean).join(" "), transform: `translate(${x} ${y})`, role: "button",
        "aria-label": `${op} ${item.fold ? item.note : item.name}${item.p ? `, ${item.p}${was}` : ""}${item.s ? `, ${item.s}` : ""}` });
      if (item.id !== undefined) g.dataset.id = item.id;
      const rect = el("rect", { width: size.w, height: size.h, rx: item.cast ? 12 : 6 });
      if (byHeat) rect.style.fill = item.heat == null ? "var(--other)" : heat(item.heat);
      if (item.fold && !open.has(item)) {
        g.append(el("rect", { width: size.w, height: size.h, rx: 6, x: 4, y: 4, class: "under" }));
      }
      g.append(rect);
      const badge = short[item.p] || item.p || "";
      const mark = marks[item.s] || "";
      if (item.cast) {
        g.append(el("text", { x: size.w / 2, y: 16, "text-anchor": "middle", class: "op" }, `${mark} ${item.b || "?"}→${item.p}`));
      } else if (item.fold) {
        g.append(el("text", { x: 10, y: 19, class: "op" }, `${open.has(item) ? "▾" : "▸"} ${op}${badge ? ` · ${item.b ? `${short[item.b] || item.b}→` : ""}${badge}` : ""}`));
        if (!open.has(item)) g.append(el("text", { x: 10, y: 36, class: "name" }, cut(item.s === "mixed" ? item.note : item.title || item.note, (size.w - 20) / 6)));
      } else if (item.io) {
        g.append(el("text", { x: 10, y: 17, class: "name" }, clip(`${op} ${item.name}`, (size.w - 20) / 6.2)));
      } else {
        const head = `${item.bodies ? (open.has(item) ? "▾ " : "▸ ") : ""}${mark ? `${mark} ` : ""}${op}`;
        g.append(el("text", { x: 10, y: 18, class: "op" }, cut(head, (size.w - 26 - 7 * (badge.length + (item.b ? 3 : 0))) / 7.4)));
        if (badge) g.append(el("text", { x: size.w - 9, y: 18, "text-anchor": "end", class: "badge" },
          item.b && item.b !== item.p ? `${short[item.b] || item.b}→${badge}` : badge));
        if (!open.has(item)) g.append(el("text", { x: 10, y: 35, class: "name" }, clip(item.name, (size.w - 20) / 6.2)));
      }
      if (item.mix && !open.has(item)) {
        const total = item.mix.reduce((sum, [, n]) => sum + n, 0);
        let at = 8;
        for (const [name, n] of item.mix) {
          const part = n / total * (size.w - 16);
          g.append(el("rect", { x: at, y: size.h - 7, width: part, height: 4, class: `share ${name}` }));
          at += part;
        }
      }
      const title = el("title", {}, item.fold ? `${item.title ? `${item.title}: ` : ""}${item.note || op}` : `${op} ${item.name}`);
      g.append(title);
      target.append(g);
      let below = y + HEAD;
      for (const part of size.parts) {
        if (part.name) {
          const label = el("text", { x: x + PAD, y: below + 12, class: "bodyname" }, part.name);
          target.append(label);
          below += 18;
        }
        const inner = el("g"), left = x + (size.w - part.w) / 2;
        target.append(inner);
        if (item.fold) {
          const through = el("g");
          target.insertBefore(through, g);
          border(part, left, below, x + size.w / 2, y, y + size.h, through);
        }
        drawLevel(part, left, below, inner);
        below += part.h + PAD;
      }
      itemOf.set(g, item);
    };
    const itemOf = new WeakMap();
    let extent = { w: 0, h: 0 };
    const draw = () => {
      shown.clear();
      const plan = arrange(data.graph), group = el("g", { transform: "translate(20 20)" });
      drawLevel(plan, 0, 0, group);
      svg.replaceChildren(group);
      extent = { w: plan.w + 48, h: plan.h + 48 };
      size();
    };
    const size = () => {
      svg.setAttribute("viewBox", `0 0 ${extent.w} ${extent.h}`);
      svg.setAttribute("width", extent.w * scale);
      svg.setAttribute("height", extent.h * scale);
    };
    const zoom = (to) => {
      const x = (pane.scrollLeft + pane.clientWidth / 2) / scale, y = (pane.scrollTop + pane.clientHeight / 2) / scale;
      scale = Math.min(3, Math.max(0.05, to));
      size();
      pane.scrollLeft = x * scale - pane.clientWidth / 2;
      pane.scrollTop = y * scale - pane.clientHeight / 2;
    };
    const fit = () => zoom(Math.min(1.4, (pane.clientWidth - 4) / Math.max(1, extent.w)));
    const home = () => {                // what is on top, in the middle
      const first = shown.values().next().value;
      if (first) pane.scrollLeft = (first.x + 20 + first.w / 2) * scale - pane.clientWidth / 2;
    };
    const center = (item) => {
      const spot = shown.get(item);
      if (!spot) return;
      pane.scrollLeft = (spot.x + 20 + spot.w / 2) * scale - pane.clientWidth / 2;
      const covered = getComputedStyle(side).position === "absolute" ? side.offsetHeight : 0;
      pane.scrollTop = (spot.y + 20 + Math.min(spot.h, 60) / 2) * scale - (pane.clientHeight - covered) / 2;
    };

    // Selection
    const select = (item, { move = true, hash = true } = {}) => {
      current = item;
      for (let at = parents.get(item); at; at = parents.get(at)) open.add(at);
      draw();
      facts(item);
      if (move) { if (scale < 0.6) zoom(0.8); center(item); }
      if (hash && item.id !== undefined) history.replaceState(null, "", `#${encodeURIComponent(item.id)}`);
    };
    const toggle = (item) => {
      if (!levelsOf(item).length) return;
      const before = shown.get(item);
      if (open.has(item)) open.delete(item); else open.add(item);
      draw();
      const after = shown.get(item);
      if (before && after) {
        pane.scrollLeft += (after.x + after.w / 2 - before.x - before.w / 2) * scale;
        pane.scrollTop += (after.y - before.y) * scale;
      }
    };
    const facts = (item) => {
      side.replaceChildren();
      const close = html("button", { class: "close", title: "Close (Esc)", type: "button" }, "×");
      close.addEventListener("click", () => { side.replaceChildren(); side.classList.remove("open"); });
      side.append(close);
      side.classList.add("open");
      const title = item.fold ? `${item.fold.toLocaleString("en")} nodes` : strings[item.op];
      side.append(html("h3", {}, title));
      if (item.fold) {
        if (item.title) side.append(html("p", {}, item.title));
        side.append(html("p", {}, item.note));
        return;
      }
      side.append(html("p", { class: "nodename" }, item.name));
      if (item.rule && data.rules[item.rule]) {
        const [head, text] = data.rules[item.rule];
        const rule = html("details", { class: "rule" });
        rule.append(html("summary", {}, `${item.rule} ${head}`));
        for (const part of text.split("\n\n")) rule.append(html("p", {}, part));
        side.append(rule);
      } else if (item.rule) side.append(html("p", {}, item.rule));
      for (const [heading, rows] of item.facts || []) {
        const table = html("table");
        table.append(html("caption", {}, strings[heading]));
        for (const [label, before, after] of rows) {
          const row = table.insertRow();
          row.append(html("th", { scope: "row" }, strings[label]));
          if (after === undefined) row.append(html("td", { colspan: "2" }, strings[before]));
          else row.append(html("td", { class: "before" }, strings[before] || "–"), html("td", { class: "after" }, strings[after] || "–"));
        }
        side.append(table);
      }
    };
    svg.addEventListener("click", (event) => {
      const g = event.target.closest("g.item");
      if (!g || !itemOf.has(g)) return;
      const item = itemOf.get(g), inner = levelsOf(item).length > 0;
      current = item;
      if (inner) toggle(item); else draw();
      facts(item);
      if (item.id !== undefined) history.replaceState(null, "", `#${encodeURIComponent(item.id)}`);
      pane.focus({ preventScroll: true });
    });

    // Differences, in order
    const differs = (item) => item.s && item.s !== "same" && item.s !== "retyped";
    const step = (way) => {
      const changed = boxes.filter(differs);
      const list = changed.length ? changed : boxes.filter((item) => item.s && item.s !== "same");
      if (!list.length) return;
      const at = order.get(current) ?? (way > 0 ? -1 : Infinity);
      const next = way > 0 ? list.find((item) => order.get(item) > at) ?? list[0]
        : list.findLast((item) => order.get(item) < at) ?? list[list.length - 1];
      select(next);
    };
    const deeper = () => {
      const closed = [...shown.keys()].filter((item) => !open.has(item) && levelsOf(item).length);
      let room = 1500;
      for (const item of closed) {
        const cost = levelsOf(item).reduce((sum, [, level]) => sum + level.items.length, 0);
        if (cost > room) continue;
        room -= cost;
        open.add(item);
      }
      const before = shown.get(current);
      draw();
      if (before) center(current); else home();
    };

    // Search
    const textOf = (item) => {
      if (item.text === undefined) {
        const words = [strings[item.op], item.name, item.rule || "", item.p || ""];
        for (const [, rows] of item.facts || []) for (const row of rows) for (const k of row) words.push(strings[k]);
        Object.defineProperty(item, "text", { value: words.join("\n").toLowerCase(), writable: true });
      }
      return item.text;
    };
    let found = [], picked = -1;
    const look = () => {
      const words = search.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
      hits.replaceChildren();
      hits.hidden = !words.length;
      found = words.length ? boxes.filter((item) => words.every((word) => textOf(item).includes(word))) : [];
      const first = words.join(" ");
      const rank = (item) => item.name.toLowerCase() === first ? 0 : item.name.toLowerCase().includes(first) ? 1 : 2;
      found.sort((a, b) => rank(a) - rank(b));
      picked = found.length ? 0 : -1;
      found.slice(0, 50).forEach((item, k) => {
        const row = html("div", { role: "option", class: k === 0 ? "picked" : "" }, `${strings[item.op]}  ${item.name}`);
        row.addEventListener("pointerdown", (event) => { event.preventDefault(); pick(item); });
        hits.append(row);
      });
      if (words.length) hits.append(html("div", { class: "total" }, `${found.length.toLocaleString("en")} found`));
    };
    const pick = (item) => { hits.hidden = true; select(item); pane.focus({ preventScroll: true }); };
    search.addEventListener("input", look);
    search.addEventListener("focus", look);
    search.addEventListener("blur", () => { hits.hidden = true; });
    search.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { hits.hidden = true; pane.focus({ preventScroll: true }); }
      if (event.key === "Enter" && found[picked]) pick(found[picked]);
      if ((event.key === "ArrowDown" || event.key === "ArrowUp") && found.length) {
        event.preventDefault();
        const most = Math.min(found.length, 50);
        picked = (picked + (event.key === "ArrowDown" ? 1 : most - 1)) % most;
        [...hits.children].forEach((row, k) => row.classList.toggle("picked", k === picked));
        hits.children[picked].scrollIntoView({ block: "nearest" });
      }
    });

    // Keyboard: move to what is nearest in a direction
    const walk = (dx, dy) => {
      const from = shown.get(current);
      if (!from) { const first = [...shown.keys()][0]; if (first) select(first); return; }
      const mid = (s) => [s.x + s.w / 2, s.y + Math.min(s.h, 46) / 2], [x, y] = mid(from);
      let best = null, least = Infinity;
      for (const [item, spot] of shown) {
        if (item === current) continue;
        const [px, py] = mid(spot), along = (px - x) * dx + (py - y) * dy, across = Math.abs((px - x) * dy) + Math.abs((py - y) * dx);
        if (along < 8) continue;
        const cost = along + 2 * across;
        if (cost < least) { least = cost; best = item; }
      }
      if (best) select(best);
    };
    pane.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const moves = { ArrowDown: [0, 1], ArrowUp: [0, -1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] };
      const keys = { n: () => step(1), p: () => step(-1), "+": () => zoom(scale * 1.25), "-": () => zoom(scale / 1.25), 0: fit,
        Enter: () => current && (toggle(current), center(current)),
        Escape: () => { side.replaceChildren(); side.classList.remove("open"); } };
      if (moves[event.key]) walk(...moves[event.key]);
      else if (keys[event.key]) keys[event.key]();
      else return;
      event.preventDefault();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "/" && !/^(INPUT|TEXTAREA)$/.test(document.activeElement.tagName)) { event.preventDefault(); search.focus(); }
    });
    pane.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      zoom(scale * (event.deltaY < 0 ? 1.1 : 1 / 1.1));
    }, { passive: false });

    // A node per URL fragment
    const follow = () => {
      let id = location.hash.slice(1);
      try { id = decodeURIComponent(id); } catch { return; }
      const item = byId.get(id);
      if (item) { select(item, { hash: false }); body.scrollIntoView({ block: "nearest" }); }
    };
    addEventListener("hashchange", follow);
    draw();
    const wide = extent.w > pane.clientWidth;
    scale = wide ? Math.max(0.35, Math.min(1, (pane.clientWidth - 4) / extent.w)) : 1;
    size();
    home();
    follow();
  }

  for (const root of document.querySelectorAll(".graph")) view(root, all[root.dataset.graph]);
  document.documentElement.dataset.ready = "yes";
})();
