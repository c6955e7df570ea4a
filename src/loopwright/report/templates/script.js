"use strict";
/* Hover and zoom of the charts; the page is whole without it. */
function prepare(root) {
  const space = "http://www.w3.org/2000/svg";
  const show = (value, unit) => unit === "percent" ? (100 * value).toPrecision(3) + " %"
    : unit === "bytes" ? (Math.abs(value) >= 1e9 ? (value / 1e9).toPrecision(3) + " GB" : (value / 1e6).toPrecision(3) + " MB")
    : Number.isInteger(value) ? value.toLocaleString("en") : Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6 ? value.toExponential(2) : value.toPrecision(4);
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] <= x) low = middle; else high = middle; }
    return high >= 0 && Math.abs(xs[high] - x) < Math.abs(xs[low] - x) ? high : low;
  };
  for (const svg of root.querySelectorAll("svg.chart")) {
    const data = JSON.parse(svg.nextElementSibling.textContent), figure = svg.closest("figure");
    const [width, height, left, right, top, bottom] = data.frame;
    const inner = width - left - right, original = svg.innerHTML;
    let [low, high, floor, ceiling] = data.range, pressed = null, button = null;
    const scale = value => data.log ? Math.log(Math.max(value, 1e-300)) : value;
    const toX = x => left + (x - low) / (high - low) * inner;
    const toY = y => height - bottom - (scale(y) - scale(floor)) / (scale(ceiling) - scale(floor)) * (height - bottom - top);
    const fromEvent = event => {
      const box = svg.getBoundingClientRect();
      return low + ((event.clientX - box.left) / box.width * width - left) / inner * (high - low);
    };
    const add = (name, attributes, text) => {
      const node = document.createElementNS(space, name);
      for (const key in attributes) node.setAttribute(key, attributes[key]);
      if (text !== undefined) node.textContent = text;
      svg.appendChild(node);
      return node;
    };
    const tip = document.createElement("div");
    tip.className = "tip"; tip.hidden = true; figure.appendChild(tip);
    let hair = null, brush = null;
    const zoom = (from, to) => {
      [low, high] = [from, to];
      const seen = data.curves.map(curve => curve.x.map((x, i) => [x, curve.y[i]]).filter(([x]) => x >= from && x <= to));
      const values = seen.flat().map(point => point[1]);
      if (!values.length) return reset();
      const bottomValue = Math.min(...values), topValue = Math.max(...values), room = 0.06 * (topValue - bottomValue) || 0.1 * Math.abs(topValue) || 1;
      [floor, ceiling] = data.log ? [bottomValue * 0.9, topValue * 1.1] : [bottomValue - room, topValue + room];
      const classes = [...svg.querySelectorAll("path.line")].map(path => [path.dataset.curve, path.getAttribute("class")]);
      svg.textContent = "";
      for (let i = 0; i <= 4; i++) {
        const value = data.log ? Math.exp(scale(floor) + i / 4 * (scale(ceiling) - scale(floor))) : floor + i / 4 * (ceiling - floor), y = toY(value);
        add("line", {class: "grid", x1: left, x2: width - right, y1: y, y2: y});
        add("text", {class: "tick y", x: left - 6, y: y + 3.5}, show(value, data.unit));
        const x = low + i / 4 * (high - low);
        add("text", {class: "tick x", x: toX(x), y: height - 7}, Math.round(x).toLocaleString("en"));
      }
      for (const [kind, update, , colour] of data.marks) if (update >= low && update <= high)
        add("line", {class: "mark " + (kind === "save" ? "mode" : kind) + (colour === null ? "" : " own c" + colour), x1: toX(update), x2: toX(update), y1: kind === "save" ? height - bottom - 8 : top, y2: height - bottom});
      for (const [index, kind] of classes)
        add("path", {class: kind, "data-curve": index, d: "M" + seen[index].map(([x, y]) => toX(x).toFixed(1) + " " + toY(y).toFixed(1)).join("L")});
      hair = brush = null;
      if (!button) {
        button = document.createElement("button");
        button.className = "reset"; button.textContent = "whole run"; button.onclick = reset; figure.appendChild(button);
      }
    };
    const reset = () => {
      [low, high, floor, ceiling] = data.range; svg.innerHTML = original; hair = brush = null;
      if (button) { button.remove(); button = null; }
    };
    svg.addEventListener("pointermove", event => {
      const x = Math.min(Math.max(fromEvent(event), low), high);
      const rows = data.curves.filter(curve => curve.x.length).map(curve => { const i = nearest(curve.x, x); return [curve.name, curve.x[i], curve.y[i]]; });
      const closest = rows.reduce((best, row) => Math.abs(row[1] - x) < Math.abs(best - x) ? row[1] : best, rows[0][1]);
      hair = hair || add("line", {class: "hair", y1: top, y2: height - bottom});
      hair.setAttribute("x1", toX(closest)); hair.setAttribute("x2", toX(closest));
      if (pressed !== null) {
        brush = brush || add("rect", {class: "brush", y: top, height: height - top - bottom});
        brush.setAttribute("x", toX(Math.min(pressed, x))); brush.setAttribute("width", Math.abs(toX(x) - toX(pressed)));
      }
      const reach = (high - low) / inner * 5;
      tip.textContent = "";
      const head = document.createElement("b"); head.textContent = "update " + closest.toLocaleString("en"); tip.appendChild(head);
      for (const [name, at, value] of rows) {
        const row = document.createElement("div");
        row.textContent = name + "  " + show(value, data.unit) + (at === closest ? "" : "  (at " + at.toLocaleString("en") + ")");
        tip.appendChild(row);
      }
      for (const [, update, text] of data.marks.filter(mark => Math.abs(mark[1] - x) <= reach).slice(0, 3)) {
        const row = document.createElement("div"); row.textContent = text; tip.appendChild(row);
      }
      tip.hidden = false;
      const box = svg.getBoundingClientRect(), place = event.clientX - box.left;
      tip.style.top = svg.offsetTop + 8 + "px";
      tip.style.left = place > box.width / 2 ? "" : place + 16 + "px";
      tip.style.right = place > box.width / 2 ? box.width - place + 16 + "px" : "";
    });
    svg.addEventListener("pointerdown", event => { pressed = Math.min(Math.max(fromEvent(event), low), high); event.preventDefault(); });
    svg.addEventListener("pointerup", event => {
      if (pressed === null) return;
      const [from, to] = [pressed, Math.min(Math.max(fromEvent(event), low), high)].sort((a, b) => a - b);
      pressed = null;
      if (to - from > (high - low) * 0.02) zoom(from, to); else if (brush) { brush.remove(); brush = null; }
    });
    svg.addEventListener("pointerleave", () => { tip.hidden = true; pressed = null; if (hair) hair.remove(); if (brush) brush.remove(); hair = brush = null; });
    svg.addEventListener("dblclick", reset);
  }
}
prepare(document);
