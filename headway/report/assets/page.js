"use strict";
/* Draws what the page's data hold: step times, bucket shares, timelines, heat maps. Reads nothing from outside. */
(() => {
  const root = document.documentElement;
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  root.classList.add("scripted");

  /* ---- numbers -------------------------------------------------------------------------------------------------- */

  // Inverse of headway.report.charts.encode: zigzag LEB128 differences of codes; code 0 = missing.
  const decode = (coded) => {
    const text = atob(coded.data), out = new Array(coded.n);
    let at = 0, code = 0;
    for (let i = 0; i < coded.n; i++) {
      let number = 0, weight = 1, byte;
      do { byte = text.charCodeAt(at++); number += (byte & 127) * weight; weight *= 128; } while (byte > 127);
      code += number % 2 ? -(number + 1) / 2 : number / 2;
      out[i] = code > 0 ? (code - 1 + coded.base) / coded.per : null;
    }
    return out;
  };
  const short = (x, digits) => { const text = x.toPrecision(digits); return text.includes("e") ? String(+text) : text; };
  const seconds = (s) => {
    if (s === null || s === undefined) return "–";
    const size = Math.abs(s);
    if (size === 0) return "0";
    if (size < 0.9995e-6) return short(s * 1e9, 3) + " ns";
    if (size < 0.9995e-3) return short(s * 1e6, 3) + " µs";
    if (size < 0.9995) return short(s * 1e3, 3) + " ms";
    if (size < 99.95) return short(s, 3) + " s";
    if (size < 3600) return Math.floor(s / 60) + " min " + Math.round(s % 60) + " s";
    return Math.floor(s / 3600) + " h " + Math.round(s % 3600 / 60) + " min";
  };
  // Axis labels: one unit for the whole axis, no more digits than its spacing needs.
  const axisSeconds = (splits) => {
    const known = splits.filter((x) => x !== null);
    const top = Math.max(...known.map(Math.abs));
    const [scale, unit] = top < 1e-6 ? [1e9, "ns"] : top < 1e-3 ? [1e6, "µs"] : top < 1 ? [1e3, "ms"] : top < 600 ? [1, "s"] : [1 / 60, "min"];
    return splits.map((x) => (x === null ? "" : +(x * scale).toPrecision(6) + " " + unit));
  };
  const count = (x) => x.toLocaleString("en-US");
  const percent = (x) => (x === null ? "–" : (100 * x).toFixed(1) + " %");

  /* ---- colours -------------------------------------------------------------------------------------------------- */

  const paint = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const bucketPaint = (bucket) => paint("--b-" + bucket) || paint("--b-unknown");
  const drawings = [];           // functions that draw everything anew in the colours and sizes of the moment
  const redraw = () => { for (const draw of drawings) draw(); };

  /* ---- step charts ---------------------------------------------------------------------------------------------- */

  const HEIGHT = 250, IDLE = "Drag to zoom, double-click for everything.";
  const sync = uPlot.sync("steps");
  const axis = (more) => ({
    stroke: paint("--quiet"), font: "12px " + paint("--sans"), grid: { stroke: paint("--rule"), width: 1 },
    ticks: { stroke: paint("--rule"), width: 1, size: 5 }, ...more,
  });
  const stepAxis = () => axis({ size: 34, gap: 4, values: (u, splits) => splits.map((x) => (Number.isInteger(x) && x >= 0 ? count(x) : "")) });

  const makeChart = (name, figure, options, columns, readout, idle) => {
    const say = (u) => { byId(name + "-readout").textContent = u.cursor.idx === null || u.cursor.idx === undefined ? idle : readout(u.cursor.idx); };
    const chart = new uPlot({
      width: Math.max(240, figure.clientWidth), height: HEIGHT, legend: { show: false }, padding: [10, 26, 0, 0],
      cursor: { y: false, points: { show: false }, drag: { x: true, y: false }, sync: { key: sync.key, scales: ["x", null] } },
      hooks: { setCursor: [say], drawClear: options.marks ? [options.marks] : [] }, ...options,
    }, columns, byId(name + "-plot"));
    say(chart);
    return chart;
  };

  const stepCharts = [];         // functions that return the charts whose x is the step; they show the same steps
  const showSteps = (min, max) => { for (const chart of stepCharts) chart().setScale("x", { min, max }); };

  // Keys on a focused chart: arrows move the cursor, + and - zoom round it, Home shows everything.
  const keyed = (figure, current) => stepCharts.push(current) && figure.addEventListener("keydown", (event) => {
    const u = current();
    if (!u || event.target !== figure) return;
    const xs = u.data[0], first = xs[0], last = xs[xs.length - 1];
    const { min, max } = u.scales.x;
    const index = u.cursor.idx ?? Math.floor(xs.length / 2);
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      const by = (event.key === "ArrowLeft" ? -1 : 1) * (event.shiftKey ? 20 : 1);
      const x = xs[Math.max(0, Math.min(xs.length - 1, index + by))];
      u.setCursor({ left: u.valToPos(x, "x"), top: u.over.clientHeight / 2 }, true, true);
    } else if (event.key === "+" || event.key === "=" || event.key === "-") {
      const half = (max - min) * (event.key === "-" ? 1 : 0.25), middle = xs[index];
      showSteps(Math.max(first, middle - half), Math.min(last, middle + half));
    } else if (event.key === "Home" || event.key === "Escape") {
      showSteps(first, last);
    } else return;
    event.preventDefault();
  });

  const roundDown = (x) => { const power = 10 ** Math.floor(Math.log10(x)); return Math.floor(x / power) * power; };

  // A value between two gaps has no line to show it: it becomes a point.
  const lonely = (values, colour) => {
    const alone = [];
    values.forEach((x, i) => { if (x !== null && (values[i - 1] ?? null) === null && (values[i + 1] ?? null) === null) alone.push(i); });
    return { show: alone.length > 0, filter: () => alone, size: 6, stroke: colour, fill: colour };
  };

  const spanOf = (chart, group) => {
    const a = chart.first + group * chart.width, b = Math.min(chart.first + chart.steps, a + chart.width) - 1;
    return a === b ? "step " + count(a) : "steps " + count(a) + "–" + count(b);
  };

  // What a page that follows a run calls with new data: the chart keeps its zoom unless it showed everything.
  const follow = {};
  const replaced = (chart, columns) => {
    const { min, max } = chart.scales.x, xs = chart.data[0];
    const whole = min <= xs[0] && max >= xs[xs.length - 1];
    chart.setData(columns, whole);
    if (!whole) chart.setScale("x", { min, max });
  };

  const stepChart = (source) => {
    const figure = byId("steps-figure"), logarithmic = byId("steps-log"), chooser = byId("steps-rank");
    let low, middle, high, lines, twice, known, largest, points, xs, many;
    const group = (i) => (twice ? i >> 1 : i);
    const spread = (values) => (twice ? Array.from({ length: points }, (_, i) => values[i >> 1]) : values);
    const load = (next) => {
      source = next;
      low = decode(source.low); middle = decode(source.middle); high = decode(source.high);
      lines = source.lines.map(decode); twice = source.width > 1;
      known = middle.filter((x) => x !== null).sort((a, b) => a - b);
      largest = high.reduce((most, x) => (x !== null && x > most ? x : most), 0);
      points = twice ? 2 * middle.length : middle.length;
      xs = Array.from({ length: points }, (_, i) => source.first + (twice ? group(i) * source.width + (i & 1) * Math.floor(source.width / 2) : i));
      many = source.ranks.length > 1 || twice;
    };
    load(source);
    const usual = known[known.length >> 1] ?? 0;
    const positive = low.every((x) => x === null || x > 0) && known.length > 0;
    logarithmic.checked = positive && usual > 0 && largest > 12 * usual;
    logarithmic.disabled = !positive;
    let chart = null;
    const chosenRank = () => (chooser && chooser.value !== "" ? +chooser.value : null);
    const columnsOf = (chosen) => [xs, spread(high), spread(low), spread(middle), ...(chosen === null ? [] : [lines[chosen]])];
    const draw = () => {
      if (chart) chart.destroy();
      const chosen = chosenRank();
      const accent = paint("--accent"), veil = (chosen === null ? 0.22 : 0.14) * (twice ? 2 : 1);
      const band = `color-mix(in srgb, ${accent} ${100 * veil}%, transparent)`;
      const edge = { stroke: twice ? band : "transparent", width: 1, points: { show: false } };
      const series = [{}, edge, edge];
      const columns = columnsOf(chosen);
      const main = chosen === null ? accent : paint("--quiet"), second = paint("--b-straggler");
      series.push({ stroke: main, width: chosen === null ? 1.25 : 1, points: lonely(columns[3], main) });
      if (chosen !== null) series.push({ stroke: second, width: 1.25, points: lonely(lines[chosen], second) });
      const readout = (i) => {
        const g = group(i), where = spanOf(source, g);
        if (chosen !== null) return `${where}: rank ${source.ranks[chosen]} ${seconds(lines[chosen][i])}, median ${seconds(middle[g])}`;
        return many ? `${where}: median ${seconds(middle[g])}, range ${seconds(low[g])} to ${seconds(high[g])}` : `${where}: ${seconds(middle[g])}`;
      };
      // Behind the line: where epochs begin (a rule) and where the model is evaluated (a tick at the foot).
      const marks = (u) => {
        const c = u.ctx, { left, top, width, height } = u.bbox, kinds = source.marks ?? {};
        c.save();
        c.beginPath(); c.rect(left, top, width, height); c.clip();
        const at = (step) => u.valToPos(step, "x", true);
        c.fillStyle = paint("--quiet"); c.globalAlpha = 0.75;
        for (const step of kinds.epoch ?? []) c.fillRect(at(step) - devicePixelRatio, top, 2 * devicePixelRatio, height);
        c.fillStyle = paint("--b-eval"); c.globalAlpha = 1;
        for (const step of kinds.evaluation ?? []) c.fillRect(at(step) - devicePixelRatio, top + height - 7 * devicePixelRatio, 2 * devicePixelRatio, 7 * devicePixelRatio);
        c.restore();
      };
      chart = makeChart("steps", figure, {
        marks,
        scales: {
          x: { time: false, range: points === 1 ? [xs[0] - 1, xs[0] + 1] : undefined },
          y: logarithmic.checked ? { distr: 3, range: (u, a, b) => [roundDown(a * 0.85), b * 1.2] } : { range: (u, a, b) => [0, (b > 0 ? b : largest || 1) * 1.06] },
        },
        axes: [stepAxis(), axis({ size: 66, values: (u, splits) => axisSeconds(splits) })],
        series, bands: many ? [{ series: [1, 2], fill: band }] : [],
      }, columns, readout, IDLE);
    };
    follow.steps = (next) => {
      const before = [twice, points < 3, many];
      load(next);
      if (before[0] === twice && !before[1] && before[2] === many) replaced(chart, columnsOf(chosenRank()));
      else draw();
    };
    logarithmic.addEventListener("change", draw);
    if (chooser) chooser.addEventListener("change", draw);
    keyed(figure, () => chart);
    drawings.push(draw);
  };

  const shareChart = (source) => {
    const figure = byId("shares-figure");
    let names, shares, groups, xs, towers;
    const load = (next) => {
      source = next;
      names = data.buckets.filter((name) => source.shares[name]);
      shares = names.map((name) => decode(source.shares[name]));
      groups = shares[0].length;
      // One more point than groups: the last one closes the last group's step.
      xs = Array.from({ length: groups + 1 }, (_, i) => Math.min(source.first + i * source.width, source.first + source.steps));
      towers = [];
      const sum = new Array(groups).fill(0);
      for (const values of shares) {
        for (let i = 0; i < groups; i++) sum[i] = values[i] === null ? null : sum[i] + values[i];
        towers.push([...sum, sum[groups - 1]]);
      }
    };
    load(source);
    let chart = null;
    const orderOf = () => names.map((_, i) => names.length - 1 - i);
    const columnsOf = () => [xs, ...orderOf().map((k) => towers[k])];
    const draw = () => {
      if (chart) chart.destroy();
      const stepped = uPlot.paths.stepped({ align: 1 });
      const readout = (i) => {
        const g = Math.min(i, groups - 1);
        const parts = names.map((name, k) => [shares[k][g], name]).filter((p) => p[0] >= 0.005).sort((a, b) => b[0] - a[0]).slice(0, 5);
        return spanOf(source, g) + ": " + (parts.map((p) => `${p[1]} ${percent(p[0])}`).join(", ") || "nothing recorded");
      };
      chart = makeChart("shares", figure, {
        scales: { x: { time: false }, y: { range: [0, 1] } },
        axes: [stepAxis(), axis({ size: 66, values: (u, splits) => splits.map((x) => Math.round(100 * x) + " %") })],
        series: [{}, ...orderOf().map((k) => ({ stroke: "transparent", width: 0, fill: bucketPaint(names[k]), paths: stepped, points: { show: false } }))],
      }, columnsOf(), readout, IDLE);
    };
    follow.shares = (next) => {
      const before = names.join();
      load(next);
      if (before === names.join()) replaced(chart, columnsOf());
      else draw();
    };
    keyed(figure, () => chart);
    drawings.push(draw);
  };

  /* ---- timeline ------------------------------------------------------------------------------------------------- */

  const unpackTimeline = (source) => {
    // Spans are numbered through all rows: `first` is the number of a row's first one.
    let first = 0;
    const rows = source.rows.map((row) => {
      const start = decode(row.start);
      const unpacked = {
        name: row.name, rank: row.rank, levels: row.levels, first, start, duration: decode(row.duration), depth: decode(row.depth),
        bucket: decode(row.bucket), code: decode(row.code), joined: decode(row.joined),
      };
      first += start.length;
      return unpacked;
    });
    const before = new Map(), after = new Map(), [sources, targets] = source.links.map(decode);
    const note = (map, key, value) => { if (map.has(key)) map.get(key).push(value); else map.set(key, [value]); };
    sources.forEach((from, i) => { note(after, from, targets[i]); note(before, targets[i], from); });
    return { ...source, rows, before, after };
  };

  const timelineChart = (panels) => {
    const figure = byId("timeline-figure"), tip = byId("timeline-tip");
    const length = Math.max(1, ...panels.map((p) => p.length));
    const LEVEL = 15, GAP = 7, HEAD = 40, AXIS = 24;
    let from = 0, to = length, margin = 90, drag = null, chosen = null;
    const canvas = byId("timeline-canvas"), chooser = byId("timeline-group"), waits = byId("timeline-waits");
    // Ranks on show: those of the group that was chosen, else the first ones; the launcher always.
    const onShow = () => {
      const ranks = new Set(chooser && chooser.value !== "" ? panels[0].groups[+chooser.value][1] : panels[0].first);
      return (row) => !ranks.size || row.rank < 0 || ranks.has(row.rank);
    };
    const rowsOf = (panel) => panel.rows.filter(onShow());
    const heightOf = (panel) => HEAD + rowsOf(panel).reduce((sum, row) => sum + row.levels * LEVEL + GAP, 0);
    let height = 0;
    const ctx = canvas.getContext("2d");
    let boxes = [];
    const draw = () => {
      const width = Math.max(240, figure.clientWidth), ratio = window.devicePixelRatio || 1, font = paint("--sans");
      height = panels.reduce((sum, panel) => sum + heightOf(panel) + 8, 0) + AXIS;
      canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
      canvas.style.width = width + "px"; canvas.style.height = height + "px";
      ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
      ctx.clearRect(0, 0, width, height);
      ctx.font = "12px " + font;
      margin = Math.min(width * 0.3, 12 + Math.max(...panels.flatMap((p) => p.rows.map((r) => ctx.measureText(r.name).width)), 30));
      const scale = (width - margin) / (to - from), x = (t) => margin + (t - from) * scale;
      const colours = [...data.buckets.map(bucketPaint), paint("--mark")], quiet = paint("--quiet"), rule = paint("--rule"), ink = paint("--ink");
      const dark = colours.map(isDark);
      boxes = [];
      let y = 0;
      const bottom = height - AXIS;
      drawAxis(x, bottom, width, rule, quiet);
      for (const panel of panels) {
        ctx.fillStyle = ink; ctx.font = "600 12px " + font; ctx.textBaseline = "alphabetic"; ctx.textAlign = "left";
        ctx.fillText(panel.title, 0, y + 14);
        ctx.font = "11px " + font;
        let lastLabel = -1e9;
        for (const [step, start] of panel.steps) {
          const at = x(start);
          if (at < margin || at > width) continue;
          ctx.fillStyle = quiet;
          ctx.globalAlpha = 0.5; ctx.fillRect(Math.round(at), y + HEAD - 18, 1, heightOf(panel) - HEAD + 14); ctx.globalAlpha = 1;
          if (at - lastLabel > 62) { ctx.fillText("step " + count(step), at + 4, y + HEAD - 8); lastLabel = at; }
        }
        y += HEAD;
        for (const row of rowsOf(panel)) { drawRow(row, panel, y, x, scale, width, colours, dark, quiet, font); y += row.levels * LEVEL + GAP; }
        y += 8;
      }
      if (chosen) drawWaits(x, width);
    };
    // Where a span stands: [row, index in it, its box's top], null when its rank is not on show.
    const find = (panel, number) => {
      for (const box of boxes)
        if (box.panel === panel && number >= box.row.first && number < box.row.first + box.row.start.length) return [box.row, number - box.row.first, box.top];
      return null;
    };
    const drawWaits = (x, width) => {
      const ink = paint("--ink"), accent = paint("--accent"), bad = paint("--bad"), { panel, number } = chosen;
      ctx.save(); ctx.beginPath(); ctx.rect(margin - 2, 0, width - margin + 2, height); ctx.clip();
      const boxOf = (found) => {
        const [row, i, top] = found, left = x(row.start[i]), right = x(row.start[i] + row.duration[i]);
        return [left, top + row.depth[i] * LEVEL, Math.max(right - left, 2), LEVEL - 1.5];
      };
      const own = find(panel, number);
      const outline = (found, colour, wide) => { ctx.strokeStyle = colour; ctx.lineWidth = wide; ctx.strokeRect(...boxOf(found)); };
      const arrow = (a, b, colour) => {
        const [left, top, wide, high] = boxOf(a), [to, below, , deep] = boxOf(b);
        ctx.strokeStyle = colour; ctx.lineWidth = 1.2; ctx.beginPath();
        ctx.moveTo(Math.min(left + wide, Math.max(left, to)), top + high / 2); ctx.lineTo(to, below + deep / 2); ctx.stroke();
      };
      for (const [map, colour] of [[panel.before, accent], [panel.after, bad]])
        for (const other of map.get(number) || []) {
          const found = find(panel, other);
          if (!found) continue;
          outline(found, colour, 2);
          if (own && map === panel.before) arrow(found, own, colour); else if (own) arrow(own, found, colour);
        }
      if (own) outline(own, ink, 2.5);
      ctx.restore();
    };
    const words = (panel, number) => {
      const row = panel.rows.find((r) => number >= r.first && number < r.first + r.start.length), i = number - row.first;
      return `${panel.names[row.code[i]] || "unnamed"} (${row.name}, ${seconds(row.duration[i] / 1e9)})`;
    };
    const listed = (panel, numbers) => {
      const said = numbers.slice(0, 6).map((number) => words(panel, number)).join(", ");
      return numbers.length > 6 ? `${said} and ${count(numbers.length - 6)} more` : said || "nothing on record";
    };
    const choose = (panel, number) => {
      chosen = number === null ? null : { panel, number };
      if (!chosen) waits.textContent = "";
      else {
        const part = (label, numbers) => { const p = document.createElement("p"), b = document.createElement("b"); b.textContent = label; p.append(b, " " + listed(panel, numbers)); return p; };
        const head = document.createElement("p");
        head.textContent = words(panel, number);
        waits.replaceChildren(head, part("Waited for:", panel.before.get(number) || []), part("Waited for it:", panel.after.get(number) || []));
        const row = panel.rows.find((r) => number >= r.first && number < r.first + r.start.length), i = number - row.first;
        const middle = row.start[i] + row.duration[i] / 2;
        if (middle < from || middle > to) { const span = to - from; from = Math.max(0, Math.min(length - span, middle - span / 2)); to = from + span; }
      }
      draw();
    };
    // The next choice from the keyboard: along the row, to the row above or below, or to what it waited for.
    const move = (key) => {
      const shown = rowsOf(panels[0]).filter((row) => row.start.length);
      if (!shown.length) return;
      if (!chosen) {
        const row = shown[0], i = row.start.findIndex((start, k) => start + row.duration[k] > from);
        choose(panels[0], row.first + Math.max(0, i)); return;
      }
      const { panel, number } = chosen;
      const at = shown.findIndex((row) => number >= row.first && number < row.first + row.start.length), row = shown[Math.max(0, at)];
      const i = Math.min(row.start.length - 1, Math.max(0, number - row.first));
      if (key === "w" || key === "d") { const next = ((key === "w" ? panel.before : panel.after).get(number) || []).find((n) => find(panel, n)); if (next !== undefined) choose(panel, next); return; }
      if (key === "ArrowLeft" || key === "ArrowRight") {
        const order = row.start.map((_, k) => k).sort((a, b) => row.start[a] - row.start[b] || row.depth[a] - row.depth[b]);
        const place = order.indexOf(i) + (key === "ArrowLeft" ? -1 : 1);
        if (place >= 0 && place < order.length) choose(panel, row.first + order[place]);
        return;
      }
      const next = shown[at + (key === "ArrowUp" ? -1 : 1)];
      if (!next) return;
      let best = 0;
      for (let k = 1; k < next.start.length; k++) if (Math.abs(next.start[k] - row.start[i]) < Math.abs(next.start[best] - row.start[i])) best = k;
      choose(panel, next.first + best);
    };
    const drawRow = (row, panel, top, x, scale, width, colours, dark, quiet, font) => {
      ctx.font = "12px " + font; ctx.textBaseline = "middle"; ctx.fillStyle = quiet; ctx.textAlign = "right";
      ctx.save(); ctx.beginPath(); ctx.rect(0, top, margin - 8, row.levels * LEVEL); ctx.clip();
      ctx.fillText(row.name, margin - 9, top + LEVEL / 2); ctx.restore();
      ctx.textAlign = "left"; ctx.font = "11px " + font;
      boxes.push({ row, panel, top });
      ctx.save(); ctx.beginPath(); ctx.rect(margin, top - 1, width - margin, row.levels * LEVEL + 2); ctx.clip();
      for (let i = 0; i < row.start.length; i++) {
        const start = row.start[i], stop = start + row.duration[i];
        if (stop < from || start > to) continue;
        const left = Math.max(margin - 2, x(start)), w = Math.min(width + 2, x(stop)) - left, y = top + row.depth[i] * LEVEL;
        ctx.fillStyle = colours[row.bucket[i]];
        ctx.fillRect(left, y, Math.max(w - (w > 3 ? 0.6 : 0), 0.7), LEVEL - 1.5);
        if (w > 34) {
          const text = fitted(row.joined[i] > 1 ? count(row.joined[i]) + " spans" : panel.names[row.code[i]] || "", w - 8);
          ctx.fillStyle = dark[row.bucket[i]] ? "#ffffff" : "#15191d";
          if (text) ctx.fillText(text, left + 4, y + LEVEL / 2 - 0.2);
        }
      }
      ctx.restore();
    };
    const fitted = (text, room) => {
      if (ctx.measureText(text).width <= room) return text;
      const keep = Math.floor(text.length * room / ctx.measureText(text).width) - 1;
      return keep >= 3 ? text.slice(0, keep) + "…" : "";
    };
    const drawAxis = (x, bottom, width, rule, quiet) => {
      const raw = (to - from) / Math.max(2, (width - margin) / 110), power = 10 ** Math.floor(Math.log10(raw));
      const spacing = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= raw);
      ctx.font = "12px " + paint("--sans"); ctx.textBaseline = "top"; ctx.textAlign = "center";
      for (let t = Math.ceil(from / spacing) * spacing; t <= to; t += spacing) {
        const at = x(t);
        ctx.fillStyle = rule; ctx.fillRect(Math.round(at), 4, 1, bottom);
        ctx.fillStyle = quiet;
        if (at < width - 20) ctx.fillText(t === 0 ? "0" : axisSeconds([t / 1e9, to / 1e9])[0], at, bottom + 8);
      }
    };
    const place = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
    const timeAt = (px) => from + (px - margin) / (canvas.clientWidth - margin) * (to - from);
    const show = (a, b) => {
      const span = Math.min(length, Math.max(20, b - a));
      from = Math.max(0, Math.min(length - span, a)); to = from + span; draw();
    };
    const hit = (px, py) => {
      const t = timeAt(px), slack = 2 * (to - from) / canvas.clientWidth;
      for (const { row, panel, top } of boxes) {
        const level = Math.floor((py - top) / LEVEL);
        if (py < top || level >= row.levels) continue;
        for (let i = row.start.length - 1; i >= 0; i--)
          if (row.depth[i] === level && row.start[i] - slack <= t && t <= row.start[i] + row.duration[i] + slack) return [row, panel, i];
      }
      return null;
    };
    const describe = ([row, panel, i]) => {
      const name = panel.names[row.code[i]] || "unnamed", number = row.joined[i];
      tip.replaceChildren();
      const head = document.createElement("b");
      head.textContent = number > 1 ? `${count(number)} short spans, first ${name}` : name;
      const rest = document.createElement("div");
      rest.className = "dim";
      rest.textContent = `${seconds(row.duration[i] / 1e9)} from ${seconds(row.start[i] / 1e9)} · ${row.name} · ${data.buckets[row.bucket[i]] ?? "annotation"}`;
      tip.append(head, rest);
    };
    canvas.addEventListener("mousemove", (event) => {
      const [px, py] = place(event);
      if (drag) { const by = (drag.x - px) / (canvas.clientWidth - margin) * (drag.to - drag.from); show(drag.from + by, drag.to + by); }
      const found = drag || px < margin ? null : hit(px, py);
      tip.style.display = found ? "block" : "none";
      if (!found) return;
      describe(found);
      tip.style.left = Math.max(0, Math.min(px + 14, canvas.clientWidth - tip.offsetWidth - 4)) + "px";
      tip.style.top = canvas.offsetTop + py + 16 + "px";
    });
    canvas.addEventListener("mouseleave", () => { tip.style.display = "none"; });
    let pressed = null;  // where; the click that ends a drag may come after the drag has been forgotten
    canvas.addEventListener("mousedown", (event) => { pressed = place(event)[0]; drag = { x: pressed, from, to }; });
    canvas.addEventListener("click", (event) => {
      const [px, py] = place(event);
      if (pressed !== null && Math.abs(pressed - px) > 3) return;
      const found = px < margin ? null : hit(px, py);
      if (found && found[1] === panels[0] && found[0].joined[found[2]] === 1) choose(panels[0], found[0].first + found[2]);
      else if (chosen) choose(null, null);
    });
    if (chooser) chooser.addEventListener("change", draw);
    window.addEventListener("mouseup", () => { setTimeout(() => { drag = null; }); });
    canvas.addEventListener("dblclick", () => show(0, length));
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && document.activeElement !== figure) return;
      event.preventDefault();
      const t = timeAt(place(event)[0]), factor = event.deltaY > 0 ? 1.25 : 0.8;
      show(t - (t - from) * factor, t + (to - t) * factor);
    }, { passive: false });
    figure.addEventListener("keydown", (event) => {
      const span = to - from, middle = (from + to) / 2;
      if (event.target !== figure) return;
      if ((event.shiftKey && event.key.startsWith("Arrow")) || event.key === "w" || event.key === "d") move(event.key);
      else if (event.key === "Escape" && chosen) choose(null, null);
      else if (event.key === "ArrowLeft") show(from - span / 8, to - span / 8);
      else if (event.key === "ArrowRight") show(from + span / 8, to + span / 8);
      else if (event.key === "+" || event.key === "=") show(middle - span / 4, middle + span / 4);
      else if (event.key === "-") show(middle - span, middle + span);
      else if (event.key === "Home" || event.key === "Escape") show(0, length);
      else return;
      event.preventDefault();
    });
    byId("timeline-in").addEventListener("click", () => show((3 * from + to) / 4, (from + 3 * to) / 4));
    byId("timeline-out").addEventListener("click", () => show(from - (to - from) / 2, to + (to - from) / 2));
    byId("timeline-all").addEventListener("click", () => show(0, length));
    drawings.push(draw);
  };

  const isDark = (hex) => {
    const part = (i) => { const c = parseInt(hex.slice(i, i + 2), 16) / 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
    return 0.2126 * part(1) + 0.7152 * part(3) + 0.0722 * part(5) < 0.19;
  };

  /* ---- heat maps ------------------------------------------------------------------------------------------------ */

  const heatChart = (source, index) => {
    const figure = byId(`heat-${index}-figure`), canvas = byId(`heat-${index}-canvas`), readout = byId(`heat-${index}-readout`);
    const rows = source.rows.length, columns = source.columns.length, values = decode(source.values);
    const known = values.filter((x) => x !== null), least = 1, most = Math.max(...known, data.mild);
    byId(`heat-${index}-low`).textContent = least.toFixed(2) + "x";
    byId(`heat-${index}-high`).textContent = most.toFixed(2) + "x";
    const cellHeight = Math.max(2, Math.min(22, Math.floor(420 / rows))), AXIS = 22, ctx = canvas.getContext("2d");
    let margin = 40, cellWidth = 1;
    const draw = () => {
      const width = Math.max(240, figure.clientWidth), height = rows * cellHeight + AXIS, ratio = window.devicePixelRatio || 1;
      canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
      canvas.style.width = width + "px"; canvas.style.height = height + "px";
      ctx.setTransform(ratio, 0, 0, ratio, 0, 0); ctx.clearRect(0, 0, width, height);
      ctx.font = "12px " + paint("--sans");
      const label = (name) => `${source.row_title} ${name}`;
      margin = 12 + Math.max(...source.rows.map((name) => ctx.measureText(label(name.split("–")[0])).width));
      cellWidth = (width - margin) / columns;
      const from = paint("--heat-0"), to = paint("--heat-1");
      const shades = Array.from({ length: 65 }, (_, i) => `color-mix(in oklab, ${to} ${i / 0.64}%, ${from})`);
      const gap = cellHeight > 6 ? 1 : 0;
      for (let r = 0; r < rows; r++) for (let c = 0; c < columns; c++) {
        const value = values[r * columns + c];
        if (value === null) continue;
        ctx.fillStyle = shades[Math.round(64 * Math.max(0, value - least) / (most - least))];
        const left = Math.floor(margin + c * cellWidth), right = Math.floor(margin + (c + 1) * cellWidth);
        ctx.fillRect(left, r * cellHeight, Math.max(1, right - left - (cellWidth > 6 ? gap : 0)), cellHeight - gap);
      }
      ctx.fillStyle = paint("--quiet"); ctx.textAlign = "right"; ctx.textBaseline = "middle";
      const everyRow = cellHeight >= 14 ? 1 : Math.ceil(28 / cellHeight);
      for (let r = 0; r < rows; r += everyRow) ctx.fillText(label(source.rows[r].split("–")[0]), margin - 8, Math.max(7, (r + 0.5) * cellHeight));
      ctx.textAlign = "left"; ctx.textBaseline = "top";
      const everyColumn = Math.max(1, Math.ceil(90 / cellWidth));
      for (let c = 0; c < columns; c += everyColumn)
        if (margin + c * cellWidth < width - 40) ctx.fillText((c ? "" : source.column_title + " ") + source.columns[c].split("–")[0], margin + c * cellWidth, rows * cellHeight + 6);
    };
    const tell = (r, c) => {
      const inside = r >= 0 && c >= 0 && r < rows && c < columns, value = inside ? values[r * columns + c] : null;
      readout.textContent = inside ? `${source.row_title} ${source.rows[r]}, ${source.column_title} ${source.columns[c]}: ${value === null ? "nothing recorded" : value.toFixed(2) + "x"}` : "";
    };
    canvas.addEventListener("mousemove", (event) => {
      const box = canvas.getBoundingClientRect();
      tell(Math.floor((event.clientY - box.top) / cellHeight), Math.floor((event.clientX - box.left - margin) / cellWidth));
    });
    canvas.addEventListener("mouseleave", () => tell(-1, -1));
    let at = [0, 0];
    figure.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
      if (!by) return;
      at = [Math.max(0, Math.min(rows - 1, at[0] + by[0])), Math.max(0, Math.min(columns - 1, at[1] + by[1]))];
      tell(...at);
      event.preventDefault();
    });
    drawings.push(draw);
  };

  /* ---- the page ------------------------------------------------------------------------------------------------- */

  if (data.steps) stepChart(data.steps);
  if (data.shares) shareChart(data.shares);
  if (data.timelines.length) timelineChart(data.timelines.map(unpackTimeline));
  data.heat.forEach(heatChart);

  const button = byId("theme"), prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const isDarkNow = () => (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);
  const label = () => { button.textContent = isDarkNow() ? "Light" : "Dark"; };
  button.addEventListener("click", () => { root.dataset.theme = isDarkNow() ? "light" : "dark"; label(); redraw(); });
  prefersDark.addEventListener("change", () => { label(); redraw(); });
  matchMedia("print").addEventListener("change", redraw);
  window.addEventListener("beforeprint", redraw);
  window.addEventListener("afterprint", redraw);
  let width = innerWidth, pending = 0;
  window.addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    cancelAnimationFrame(pending);
    pending = requestAnimationFrame(redraw);
  });
  label();
  redraw();
  /*LIVE*/
  requestAnimationFrame(() => requestAnimationFrame(() => { root.dataset.drawn = "yes"; performance.mark("drawn"); }));
})();
