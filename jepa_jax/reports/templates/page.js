// Adds what a reader can do to a page: read values under the pointer, switch to a logarithmic axis, hide a series, sort a table.

const text = v => Number.isInteger(v) || Math.abs(v) >= 1e4 ? v.toLocaleString("en") : String(+v.toPrecision(5));

const add = (parent, name) => {
  const element = parent.appendChild(document.createElement("div"));
  element.className = name;
  return element;
};

// Index of the value of a sorted array that is nearest to x.
const nearest = (xs, x) => {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const mid = (low + high) >> 1;
    if (xs[mid] < x) low = mid; else high = mid;
  }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
};

document.querySelectorAll(".chart").forEach(chart => {
  const data = JSON.parse(chart.querySelector("script").textContent);
  const plot = chart.querySelector(".plot"), toggle = chart.querySelector(".toggle");
  const [x0, x1] = data.x;
  const hidden = new Set(), extras = [];
  if (toggle) toggle.onclick = () => chart.classList.toggle("log");
  chart.querySelectorAll(".key").forEach(key => key.onclick = () => {
    const on = key.getAttribute("aria-pressed") === "false", s = +key.dataset.s;
    key.setAttribute("aria-pressed", on);
    on ? hidden.delete(s) : hidden.add(s);
    chart.querySelectorAll("path[data-s='" + s + "']").forEach(p => p.classList.toggle("off", !on));
  });
  const clear = () => { while (extras.length) extras.pop().remove(); };
  plot.onpointerleave = clear;
  plot.onpointermove = event => {
    clear();
    const box = plot.getBoundingClientRect();
    const x = x0 + (x1 - x0) * Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const isLog = chart.classList.contains("log"), [y0, y1] = data.scales[isLog ? "log" : "lin"];
    const hits = data.series.map((s, i) => ({i, s, k: nearest(s.x, x)})).filter(h => h.s.x.length && !hidden.has(h.i));
    if (!hits.length) return;
    const at = hits.map(h => h.s.x[h.k]).reduce((a, b) => Math.abs(a - x) <= Math.abs(b - x) ? a : b);
    const near = hits.filter(h => Math.abs(h.s.x[h.k] - at) <= .03 * (x1 - x0));
    const left = 100 * (at - x0) / (x1 - x0), shown = data.xlog ? +(10 ** at).toPrecision(5) : at;
    const cursor = add(plot, "cursor"), tip = add(plot, "tip");
    extras.push(cursor, tip);
    cursor.style.left = left + "%";
    tip.style[left > 55 ? "right" : "left"] = "calc(" + (left > 55 ? 100 - left : left) + "% + 10px)";
    const second = data.per ? " · " + data.per[0] + " " + (at * data.per[1]).toFixed(2) : "";
    add(tip, "").textContent = data.xname + " " + text(shown) + second;
    for (const {i, s, k} of near) {
      const row = add(tip, ""), y = s.y[k], top = ((isLog ? Math.log10(y) : y) - y0) / (y1 - y0);
      row.textContent = s.name;
      row.style.color = data.colours[i];
      row.appendChild(document.createElement("b")).textContent = text(y);
      if (!isFinite(top)) continue;
      const dot = add(plot, "dot");
      dot.style.color = data.colours[i];
      dot.style.left = 100 * (s.x[k] - x0) / (x1 - x0) + "%";
      dot.style.top = 100 * (1 - top) + "%";
      extras.push(dot);
    }
  };
});

// Empty cells stay last in both directions: a failure is neither the fastest nor the slowest.
document.querySelectorAll(".sortable").forEach(table => {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  const isNumber = v => v !== "" && isFinite(v);
  const compare = (a, b) => isNumber(a) && isNumber(b) ? a - b : a.localeCompare(b);
  heads.forEach((head, column) => head.querySelector("button").onclick = () => {
    const before = head.getAttribute("aria-sort");
    const up = before === "none" ? !head.classList.contains("num") : before === "descending";
    heads.forEach(other => other.setAttribute("aria-sort", "none"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const value = row => row.cells[column].dataset.v;
    body.append(...[...body.rows].sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      return x === "" || y === "" ? (x === "") - (y === "") : (up ? 1 : -1) * compare(x, y);
    }));
  });
});
