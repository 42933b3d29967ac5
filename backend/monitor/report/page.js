"use strict";
// Everything that a user or a model wrote enters the page as text, never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const runs = data.runs, many = runs.length > 1;
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
function svg(tag, attributes = {}, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}
const colour = (i) => `var(--c${i % 8})`;
function num(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return (value / 1e9).toFixed(1) + "G";
  if (size >= 1e6) return (value / 1e6).toFixed(1) + "M";
  if (size >= 1e4) return (value / 1e3).toFixed(1) + "k";
  if (size >= 100 || Number.isInteger(value)) return String(Math.round(value));
  return size !== 0 && size < 0.001 ? value.toExponential(1) : String(Number(value.toPrecision(3)));
}
function time(s) {
  if (s < 60) return (s < 10 ? s.toFixed(1) : Math.round(s)) + " s";
  const m = Math.floor(s / 60), h = Math.floor(m / 60), two = (x) => String(x).padStart(2, "0");
  return h ? `${h}:${two(m % 60)}:${two(Math.floor(s % 60))}` : `${m}:${two(Math.floor(s % 60))}`;
}
function ticks(low, high, most) {
  const span = high - low || 1;
  let step = 10 ** Math.floor(Math.log10(span / most));
  for (const f of [1, 2, 5, 10]) if (span / (step * f) <= most) { step *= f; break; }
  const all = [];
  for (let t = Math.ceil(low / step - 1e-9) * step; t <= high + step * 1e-9; t += step) all.push(Number(t.toPrecision(10)));
  return all;
}
const tip = $("tip");
function showTip(x, y, text) {
  tip.textContent = text; tip.hidden = false;
  const w = tip.offsetWidth, page = document.documentElement.clientWidth;
  tip.style.left = Math.max(4, Math.min(x + 14 + scrollX, page - w - 8)) + "px";
  tip.style.top = y + 16 + scrollY + "px";
}
const hideTip = () => { tip.hidden = true; };

// ---- what the runs came to
function fact(name, value, sub, kind) {
  const dd = el("dd", kind ? { class: kind } : {}, value);
  if (sub) dd.append(" ", el("span", { class: "sub" }, sub));
  return el("div", {}, el("dt", {}, name), dd);
}
runs.forEach((run, i) => {
  const title = el("h1", {}, many ? el("span", { class: "dot", style: `background:${colour(i)}` }) : null, run.name);
  const facts = el("dl", { class: "facts" });
  const kind = { done: "good", failed: "bad", stopped: "warn" }[run.state];
  facts.append(fact("State", run.state, run.starts > 1 ? `${run.starts} starts` : "", kind));
  facts.append(fact("Steps", num(run.steps), run.total ? `of ${run.total}` : ""));
  if (run.held_out) facts.append(fact("Held-out reward", `${num(run.held_out[0])} → ${num(run.held_out[1])}`));
  if (run.reward !== null) facts.append(fact("Reward", num(run.reward), "last batch"));
  const lag = run.series["staleness/head_max"];
  if (lag) facts.append(fact("Largest lag", num(Math.max(...lag.map((p) => p[1]))), run.bound !== null ? `bound ${run.bound}` : ""));
  if (run.timeline) facts.append(fact("Time", time(run.timeline.seconds), run.starts > 1 ? "since the last start" : "of training"));
  const audit = { clean: ["clean", "good"], wrong: [`${run.audit.lines.length} wrong`, "bad"], none: ["none", ""] }[run.audit.state];
  facts.append(fact("Audit", audit[0], run.audit.state === "clean" ? "nothing lost, nothing twice" : run.audit.state === "none" ? run.audit.lines[0] : "", audit[1]));
  const box = el("div", { class: many ? "run several" : "run" }, title, facts);
  if (run.audit.state === "wrong") box.append(el("ul", { class: "problems" }, ...run.audit.lines.map((l) => el("li", {}, l))));
  if (run.log.length && run.state !== "done") box.append(el("details", run.state === "failed" ? { open: "" } : {}, el("summary", {}, "End of driver.log"), el("pre", {}, run.log.join("\n"))));
  $("runs").append(box);
});

// ---- curves
function smooth(points) {
  if (points.length < 40) return null;
  const w = Math.max(3, Math.round(points.length / 20));
  let sum = 0; const out = [], window = [];
  for (const [x, y] of points) {
    window.push(y); sum += y;
    if (window.length > w) sum -= window.shift();
    out.push([x, sum / window.length]);
  }
  return out;
}
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const plots = [];
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach((u) => u.redraw(false)));
function valueRange(bounds) {
  return (u, low, high) => {
    if (low === null) return [0, 1];
    high = Math.max(high, ...bounds);
    if (low >= 0 && low < 0.4 * high) low = 0;
    // The running sums of a smoothed curve differ by their rounding.
    if (high - low <= 1e-9 * Math.abs(high)) { high += Math.abs(high) * 0.1 || 1; low -= low === 0 ? 0 : Math.abs(low) * 0.1; }
    return [low, bounds.includes(high) ? high + 0.12 * (high - low) : high];
  };
}
function annotate(u, bounds, labels) {
  const { ctx, bbox } = u, px = devicePixelRatio, right = bbox.left + bbox.width;
  ctx.save();
  ctx.textAlign = "left"; ctx.textBaseline = "middle"; ctx.setLineDash([2 * px, 3 * px]); ctx.strokeStyle = css("--bad"); ctx.lineWidth = 1.2 * px;
  ctx.font = `${11 * px}px system-ui, sans-serif`; ctx.fillStyle = css("--quiet");
  for (const b of bounds) {
    const y = u.valToPos(b, "y", true);
    ctx.beginPath(); ctx.moveTo(bbox.left, y); ctx.lineTo(right, y); ctx.stroke();
    ctx.fillText(`bound ${b}`, bbox.left + 4 * px, y - 8 * px);
  }
  ctx.font = `600 ${11 * px}px system-ui, sans-serif`;
  const placed = labels.map((l) => ({ y: Math.min(Math.max(u.valToPos(l.last, "y", true), bbox.top), bbox.top + bbox.height), ...l })).sort((a, b) => a.y - b.y);
  for (let k = 1; k < placed.length; k++) placed[k].y = Math.max(placed[k].y, placed[k - 1].y + 13 * px);
  const over = placed.length ? placed.at(-1).y - (bbox.top + bbox.height + 4 * px) : 0;
  for (const l of placed) {
    ctx.fillStyle = l.stroke();
    ctx.fillText(l.name.length > 13 ? l.name.slice(0, 12) + "…" : l.name, right + 5 * px, l.y - Math.max(0, over));
  }
  ctx.restore();
}
function chart(spec) {
  const lines = [];
  runs.forEach((run, i) => spec.tags.forEach(({ tag, name }, j) => {
    if (run.series[tag]) lines.push({ points: run.series[tag], stroke: () => css(`--c${(many ? i : j) % 8}`), name: many ? (j ? `${run.name}, ${name}` : run.name) : name, labelled: !many || j === 0, dashed: many && j > 0, sparse: tag.startsWith("eval/") });
  }));
  if (!lines.length) return null;
  const bounds = spec.tags[0].tag === "staleness/head_max" ? [...new Set(runs.map((r) => r.bound).filter((b) => b !== null))] : [];
  const tables = [], series = [{}], labels = [];
  for (const l of lines) {
    const add = (points, more) => {
      tables.push([points.map((p) => p[0]), points.map((p) => p[1])]);
      series.push({ stroke: l.stroke, width: 1.8, spanGaps: true, points: { show: l.sparse || points.length < 3, size: 5.2, fill: l.stroke }, ...more });
    };
    const smoothed = l.sparse ? null : smooth(l.points);
    if (smoothed) add(l.points, { alpha: .28, width: 1.1 });
    add(smoothed || l.points, l.dashed ? { dash: [5, 3] } : {});
    if (l.labelled && lines.length > 1 && lines.length <= 8) labels.push({ name: l.name, stroke: l.stroke, last: (smoothed || l.points).at(-1)[1] });
    l.at = new Map(l.points);
  }
  const xs = lines.flatMap((l) => l.points.map((p) => p[0])), quiet = () => css("--quiet");
  const summary = lines.map((l) => `${l.name} from ${num(l.points[0][1])} to ${num(l.points.at(-1)[1])}`).join("; ");
  const root = el("div", { class: "plot", role: "img", tabindex: 0, "aria-label": `${spec.title}, ${spec.unit}, steps ${num(Math.min(...xs))} to ${num(Math.max(...xs))}: ${summary}` });
  let pointed = false;
  const read = (u) => {
    const step = u.cursor.left < 0 ? undefined : u.data[0][u.cursor.idx];
    if (!pointed) return;
    if (step === undefined) { hideTip(); return; }
    const box = u.over.getBoundingClientRect(), values = lines.filter((l) => l.at.has(step)).map((l) => `${l.name}  ${num(l.at.get(step))}`);
    showTip(box.left + u.cursor.left, box.top + u.cursor.top, `step ${step}\n${values.join("\n")}`);
  };
  const axis = { stroke: quiet, font: "11px system-ui, sans-serif", ticks: { show: false } };
  const u = new uPlot({
    width: 360, height: 190, series, legend: { show: false }, padding: [10, labels.length ? 78 : 12, 0, 0],
    scales: { x: { time: false, range: (_, low, high) => low === high ? [low - 1, high + 1] : [low, high] }, y: { range: valueRange(bounds) } },
    axes: [
      { ...axis, size: 24, gap: 6, grid: { show: false }, incrs: [1, 2, 5].flatMap((n) => [0, 1, 2, 3, 4, 5, 6].map((e) => n * 10 ** e)).sort((a, b) => a - b), values: (_, ticks) => ticks.map(num) },
      { ...axis, size: 42, gap: 4, space: 36, grid: { stroke: () => css("--line"), width: 1 }, values: (_, ticks) => ticks.map(num) },
    ],
    cursor: { y: false, points: { size: 6 }, sync: { key: "steps", scales: ["x", null] } },
    hooks: { setCursor: [read], draw: [(plot) => annotate(plot, bounds, labels)] },
  }, uPlot.join(tables), root);
  plots.push(u);
  new ResizeObserver(() => u.setSize({ width: Math.max(200, root.clientWidth), height: 190 })).observe(root);
  root.addEventListener("pointerenter", () => { pointed = true; });
  const off = () => { pointed = false; hideTip(); };
  root.addEventListener("pointerleave", off);
  root.addEventListener("blur", () => { u.setCursor({ left: -10, top: -10 }); off(); });
  root.addEventListener("keydown", (e) => {
    const d = { ArrowLeft: -1, ArrowRight: 1 }[e.key], steps = u.data[0];
    if (!d) return;
    e.preventDefault(); pointed = true;
    const next = u.cursor.left < 0 || u.cursor.idx === null ? steps.length - 1 : Math.max(0, Math.min(steps.length - 1, u.cursor.idx + d));
    u.setCursor({ left: u.valToPos(steps[next], "x"), top: u.over.clientHeight / 2 });
  });
  const unit = [spec.dashed, spec.unit === "1" ? "" : spec.unit].filter(Boolean).join(" · ");
  const now = lines.length === 1 ? num(lines[0].points.at(-1)[1]) : "";
  return el("figure", {}, el("figcaption", {}, el("h3", { title: spec.meaning }, spec.title), el("span", { class: "now" }, now ? `${now} ${unit}` : unit)), root);
}
const drawn = data.charts.map(chart).filter(Boolean);
$("charts").append(...(drawn.length ? drawn : [el("p", { class: "quiet" }, "No training step is finished yet.")]));

// ---- pictures as wide as the page: drawn again when its width changes
const redraws = [];
function fitted(draw) {
  const holder = el("div", { class: "strip" });
  let width = 0;
  redraws.push(() => { const now = Math.max(300, Math.round(holder.clientWidth)); if (now !== width) { width = now; holder.replaceChildren(draw(now)); } });
  return { holder, redraw: () => { if (width) holder.replaceChildren(draw(width)); } };
}
let waiting = 0;
addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(() => redraws.forEach((f) => f()), 120); });

// ---- staleness
runs.forEach((run, i) => {
  const columns = run.lags;
  if (!columns.length) { if (!many) $("heat").append(el("p", { class: "quiet" }, "No token is trained yet.")); return; }
  const top = Math.max(run.bound ?? 0, ...columns.flatMap((c) => Object.keys(c[2]).map(Number)));
  const picture = fitted((W) => {
    const left = 28, bottom = 24, row = Math.max(12, Math.min(26, 200 / (top + 1))), H = (top + 1) * row + bottom + 6, w = (W - left) / columns.length;
    const root = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${run.name}: share of trained tokens by lag, for steps ${columns[0][0]} to ${columns.at(-1)[1]}` });
    for (let lag = 0; lag <= top; lag++) if ((top + 1) * row / (top + 1) > 11 || lag % 5 === 0) root.append(svg("text", { x: left - 8, y: 6 + (top - lag) * row + row / 2 + 4, "text-anchor": "end" }, lag));
    columns.forEach(([first, last, tokens], k) => {
      const total = Object.values(tokens).reduce((a, b) => a + b, 0);
      for (const [lag, n] of Object.entries(tokens)) {
        const cell = svg("rect", { x: left + k * w, y: 6 + (top - lag) * row, width: Math.max(w - (w > 4 ? 1 : 0), .5), height: row - 1, style: `fill:rgba(var(--heat),${(0.08 + 0.92 * Math.sqrt(n / total)).toFixed(3)})` });
        cell.addEventListener("pointermove", (e) => showTip(e.clientX, e.clientY, `${first === last ? `step ${first}` : `steps ${first}–${last}`}, lag ${lag}\n${num(n)} tokens, ${(100 * n / total).toFixed(1)} %`));
        cell.addEventListener("pointerleave", hideTip);
        root.append(cell);
      }
    });
    const every = Math.ceil(columns.length / Math.max(3, W / 70));
    columns.forEach((c, k) => { if (k % every === 0) root.append(svg("text", { x: left + (k + .5) * w, y: H - 6, "text-anchor": "middle" }, c[0])); });
    if (run.bound !== null) root.append(svg("line", { class: "bound", x1: left, x2: W, y1: 5.5 + (top - run.bound) * row, y2: 5.5 + (top - run.bound) * row }));
    return root;
  });
  $("heat").append(many ? el("h3", { style: `color:${colour(i)}` }, run.name) : "", picture.holder);
});

// ---- time
const KINDS = [["waits for a batch", "--c1"], ["trains", "--c0"], ["publishes weights", "--c2"], ["something else", "--line"]];
function timelineOf(run, index) {
  const t = run.timeline, box = el("div", {});
  if (many) box.append(el("h3", { style: `color:${colour(index)}` }, run.name));
  if (!t) { box.append(el("p", { class: "quiet" }, "No step is finished yet.")); return box; }
  box.append(el("p", { class: "lead" }, `${t.steps.length} steps in ${time(t.seconds)}${run.starts > 1 ? " since the last start" : ""}. Where something stood still, and for how long:`));
  box.append(el("ul", { class: "bubbles" }, ...t.bubbles.map((b) => el("li", {}, el("b", {}, b.name), ` ${(100 * b.share).toFixed(b.share < .1 ? 1 : 0)} %, ${time(b.seconds)}`, el("div", { class: "bar" }, el("i", { style: `width:${Math.min(100, 100 * b.share).toFixed(2)}%` })), el("small", {}, b.meaning)))));
  const keys = Object.keys(t.windows).map(Number).sort((a, b) => (b || 1e9) - (a || 1e9));
  const buttons = keys.map((k) => el("button", { type: "button", "aria-pressed": "false", onclick: () => choose(k) }, k ? `last ${k} steps` : "all steps"));
  let key = keys.at(-1);
  const mark = () => buttons.forEach((b, n) => b.setAttribute("aria-pressed", String(keys[n] === key)));
  function choose(next) { key = next; mark(); picture.redraw(); }
  const picture = fitted((W) => {
    const w = t.windows[String(key)], left = 76, lane = 26, names = t.engines, H = lane * (names.length + 1) + 56;
    const X = (s) => left + (s - w.from) / (w.to - w.from || 1) * (W - left);
    const root = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `Timeline of ${run.name}: trainer and ${names.length} engines over ${time(w.to - w.from)}` });
    const bar = (x, width, y, h, style, text) => {
      const a = Math.max(X(x), left), z = Math.min(X(x + width), W);
      if (z - a < 0.05) return;
      const node = svg("rect", { x: a, y, width: Math.max(z - a, .6), height: h, style });
      if (text) { node.addEventListener("pointermove", (e) => showTip(e.clientX, e.clientY, text)); node.addEventListener("pointerleave", hideTip); }
      root.append(node);
    };
    root.append(svg("text", { x: left - 8, y: 28, "text-anchor": "end" }, "trainer"));
    t.steps.forEach(([version, start, wait, train, whole], n) => {
      if (start + whole < w.from) return;
      const [from, total] = t.publications[n] ?? [0, 0];
      bar(start, whole, 12, lane - 3, "fill:var(--line)", `version ${version}: ${time(whole)}`);
      bar(start, wait, 12, lane - 3, "fill:var(--c1)", `version ${version}: waits ${time(wait)} for a batch`);
      bar(start + wait, train, 12, lane - 3, "fill:var(--c0)", `version ${version}: trains ${time(train)}`);
      if (total) bar(from, total, 12, lane - 3, "fill:var(--c2)", `version ${version}: publishes ${time(total)}, engines pause ${time(t.publications[n][2])}`);
    });
    names.forEach((name, n) => {
      const y = 12 + lane * (n + 1), values = w.running[n], most = Math.max(1, ...values), cw = (w.to - w.from) / values.length;
      root.append(svg("text", { x: left - 8, y: y + 16, "text-anchor": "end" }, name.length > 14 ? name.slice(0, 13) + "…" : name));
      values.forEach((v, k) => bar(w.from + k * cw, cw, y, lane - 3, `fill:rgba(var(--heat),${(0.06 + 0.94 * v / most).toFixed(3)})`, `${name}: ${num(v)} requests at ${time(w.from + k * cw)}`));
    });
    const y = 14 + lane * (names.length + 1);
    t.publications.forEach(([from, total, stall]) => { if (from + total > w.from && stall) root.append(svg("rect", { x: Math.max(left, X(from + total - stall)), y, width: Math.max(X(from + total) - X(from + total - stall), .8), height: 5, style: "fill:var(--c2)" })); });
    root.append(svg("text", { x: left - 8, y: y + 7, "text-anchor": "end" }, "pauses"));
    for (const s of ticks(w.from, w.to, Math.max(3, W / 110))) root.append(svg("text", { x: X(s), y: H - 8, "text-anchor": "middle" }, time(s)));
    return root;
  });
  if (keys.length > 1) box.append(el("div", { class: "controls" }, el("span", { class: "group", role: "group", "aria-label": "Part of the run" }, ...buttons)));
  box.append(el("div", { class: "legend" }, ...KINDS.map(([name, c]) => el("span", {}, el("i", { style: `background:var(${c})` }), `trainer ${name}`)), el("span", {}, el("i", { style: "background:rgb(var(--heat))" }), "engine: requests under way, fuller is more")), picture.holder);
  mark();
  return box;
}
runs.forEach((run, i) => $("timeline").append(timelineOf(run, i)));
redraws.forEach((f) => f());

// ---- episodes
(function viewer() {
  const have = runs.map((run, i) => [run, i]).filter(([run]) => run.episodes.length), root = $("viewer");
  if (!have.length) { root.append(el("p", { class: "quiet" }, "No episode is recorded. A recipe says with log.episodes what is.")); return; }
  let run, step, group, row, mode = "version", end = "";
  const pick = el("select", { "aria-label": "Run", onchange: () => { open(have[pick.selectedIndex][0]); } }, ...have.map(([r]) => el("option", {}, r.name)));
  const steps = el("select", { onchange: () => openStep(Number(steps.value)) }), groups = el("select", { onchange: () => openGroup(groups.value) }), ends = el("select", { onchange: () => { end = ends.value; openEnd(); } });
  const keyOf = (e) => `${e.end} ${e.group}`, shown = () => run.episodes.filter((e) => !end || e.end === end);
  const list = el("div", { class: "list", role: "group", "aria-label": "Episodes of the group" }), pane = el("div", {});
  const modes = [["version", "Policy version"], ["advantage", "Advantage"], ["gap", "Log-prob gap"], ["logprob", "Log-prob"], ["none", "Plain"]];
  const buttons = modes.map(([key, name]) => el("button", { type: "button", "aria-pressed": String(key === mode), onclick: () => { mode = key; buttons.forEach((b, n) => b.setAttribute("aria-pressed", String(modes[n][0] === key))); show(); } }, name));
  const count = el("p", { class: "lead" });
  root.append(count, el("div", { class: "controls" }, have.length > 1 ? el("label", {}, "Run", pick) : null, el("label", {}, "End", ends), el("label", {}, "Step", steps), el("label", {}, "Group", groups), el("div", { class: "lbl" }, "Colour of tokens", el("span", { class: "group", role: "group", "aria-label": "Colour of tokens" }, ...buttons))), el("div", { class: "panes" }, list, pane));
  const options = (select, values, text) => select.replaceChildren(...values.map((v) => el("option", { value: v }, text(v))));
  function open(next) {
    run = next;
    count.textContent = run.episodes.length < run.recorded ? `${run.episodes.length} of ${run.recorded} recorded episodes, spread over all steps; the others are in episodes/ of the run folder.` : `${run.recorded} recorded episodes.`;
    const all = [...new Set(run.episodes.map((e) => e.end))];
    end = all.includes("trained") ? "trained" : all[0];
    options(ends, ["", ...all], (e) => e || "all"); ends.value = end; openEnd();
  }
  function openEnd() {
    const all = [...new Set(shown().map((e) => e.step))], last = all.includes(step) ? step : all.at(-1);
    options(steps, all, (s) => String(s)); steps.value = String(last); openStep(last);
  }
  function openStep(next) {
    step = next;
    const rows = shown().filter((e) => e.step === step), all = [...new Set(rows.map(keyOf))];
    const rewards = (g) => rows.filter((e) => keyOf(e) === g && e.reward !== null).map((e) => e.reward);
    options(groups, all, (g) => { const r = rewards(g), [kind, number] = g.split(" "); return `${number} · ${kind === "trained" ? "" : kind + " · "}${r.length ? `mean reward ${num(r.reduce((a, b) => a + b, 0) / r.length)}` : "no reward"}`; });
    const spread = (g) => { const r = rewards(g); return r.length ? Math.max(...r) - Math.min(...r) : -1; };
    const first = all.reduce((best, g) => spread(g) > spread(best) ? g : best, all[0]);
    groups.value = first; openGroup(first);
  }
  function openGroup(next) {
    group = next;
    const rows = shown().filter((e) => e.step === step && keyOf(e) === group);
    list.replaceChildren(...rows.map((e) => el("button", { type: "button", "aria-pressed": "false", onclick: (event) => choose(e, event.currentTarget) }, el("span", {}, `reward ${num(e.reward)}`), el("span", { class: "quiet" }, `lag ${num(e.head_lag)} · ${num(e.response_tokens)} tok`), el("small", {}, e.response.slice(0, 120) || "(empty)"))));
    choose(rows[0], list.firstChild);
  }
  function choose(next, button) {
    row = next;
    for (const b of list.children) b.setAttribute("aria-pressed", String(b === button));
    show();
  }
  function shades(values, rgb, most) { return (k) => { const v = values[k]; return v === null || v === undefined ? null : { back: `rgba(var(--${v < 0 ? rgb[1] : rgb[0]}),${Math.min(.6, .6 * Math.abs(v) / most).toFixed(3)})`, text: num(v) }; }; }
  function show() {
    const t = row.tokens, n = t.text ? t.text.length : 0, ends = row.spans.map((s) => s[2]);
    const spanOf = (k) => row.spans[ends.findIndex((e) => k < e)] ?? [null, false, 0];
    const versions = [...new Set(row.spans.map((s) => s[0]).filter((v) => v !== null))], legend = el("div", { class: "legend" });
    const largest = (values) => Math.max(1e-6, ...values.filter((v) => v !== null).map(Math.abs));
    let style = () => null;
    if (mode === "version") {
      style = (k) => { const v = spanOf(k)[0]; return v === null ? null : { back: `var(--v${versions.indexOf(v) % 6})`, text: `version ${v}` }; };
      legend.append(...versions.map((v, k) => el("span", {}, el("i", { style: `background:var(--v${k % 6})` }), `version ${v}`)));
    } else if (mode === "advantage" && t.advantage) {
      const most = largest(t.advantage); style = shades(t.advantage, ["plus", "minus"], most);
      legend.append(el("span", {}, el("i", { style: "background:rgba(var(--plus),.6)" }), `more likely, up to +${num(most)}`), el("span", {}, el("i", { style: "background:rgba(var(--minus),.6)" }), `less likely, down to −${num(most)}`));
    } else if (mode === "gap" && t.proximal_logprob) {
      const gap = t.proximal_logprob.map((p, k) => p === null || t.logprob[k] === null ? null : p - t.logprob[k]);
      const most = Math.max(0.05, largest(gap)); style = shades(gap, ["gap", "minus"], most);
      legend.append(el("span", {}, el("i", { style: "background:rgba(var(--gap),.6)" }), `trainer gives more than the engine, up to +${num(most)} nats`), el("span", {}, el("i", { style: "background:rgba(var(--minus),.6)" }), "trainer gives less"));
    } else if (mode === "logprob" && t.logprob) {
      const most = Math.max(1, largest(t.logprob)); style = shades(t.logprob, ["gap", "gap"], most);
      legend.append(el("span", {}, el("i", { style: "background:rgba(var(--gap),.6)" }), `unlikely when sampled, down to ${num(-most)} nats`));
    } else if (mode !== "none") legend.append(el("span", {}, "Not recorded for this episode."));
    if (row.spans.some((s) => s[0] === null)) legend.append(el("span", {}, el("i", { style: "border:1px solid var(--quiet)" }), "italic: not sampled by the policy"));
    const text = el("div", { class: "text", tabindex: 0, role: "region", "aria-label": "Response" });
    let open = null, key = null, shown = 0;
    for (let k = 0; k < n; k++) {
      const s = style(k), context = spanOf(k)[0] === null, now = `${context}|${s ? s.back + s.text : ""}`;
      if (now !== key) { open = el("span", { class: context ? "context" : null, title: s ? s.text : context ? "context" : null }); if (s) open.style.background = s.back; text.append(open); key = now; }
      open.append(t.text[k]); shown += t.text[k].length;
    }
    if (!n) text.append(row.response); else if (shown < row.response.length && ends.at(-1) > n) text.append(el("span", { class: "quiet" }, row.response.slice(shown)));
    const facts = el("dl", { class: "facts" });
    facts.append(fact("Reward", num(row.reward)), fact("Advantage", num(row.advantage)), fact("Head lag", num(row.head_lag)), fact("Tokens", num(row.response_tokens), row.end === "trained" && row.trained_tokens < row.response_tokens ? `${row.trained_tokens} trained` : ""), fact("Finish", row.finish ?? "none"), fact("End", row.end, row.reason ?? ""), fact(row.end === "trained" ? "Trained from" : row.end === "evaluated" ? "Evaluated" : "Given up at", `version ${row.version}`));
    for (const numbers of [row.reward_parts, row.metrics])
      for (const [name, value] of Object.entries(numbers ?? {})) facts.append(fact(name, num(value)));
    pane.replaceChildren(el("h3", {}, "Prompt"), el("div", { class: "text prompt", tabindex: 0, role: "region", "aria-label": "Prompt" }, row.prompt), el("h3", {}, "Response"), legend, text, facts);
  }
  open(have[0][0]);
})();

// ---- recipes
(function recipes() {
  const root = $("recipes");
  if (many) {
    if (data.differences.length) root.append(el("p", { class: "lead" }, "Settings in which the runs differ."), el("div", { class: "table" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "setting"), ...runs.map((r, i) => el("th", { scope: "col", style: `color:${colour(i)}` }, r.name)))), el("tbody", {}, ...data.differences.map((d) => el("tr", {}, el("th", { scope: "row" }, d.key), ...d.values.map((v) => el("td", {}, v))))))));
    else root.append(el("p", { class: "lead" }, "The runs have the same recipe but for their names."));
  }
  for (const run of runs) {
    root.append(el("details", {}, el("summary", {}, many ? `Recipe of ${run.name}` : "The whole recipe, with its defaults"), el("pre", {}, run.recipe)));
    const rows = Object.entries(run.summary);
    if (rows.length) root.append(el("details", {}, el("summary", {}, many ? `Summary of ${run.name}` : "Summary of the last start"), el("div", { class: "table" }, el("table", {}, el("tbody", {}, ...rows.map(([k, v]) => el("tr", {}, el("th", { scope: "row" }, k), el("td", {}, v))))))));
  }
})();
