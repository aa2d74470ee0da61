"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const runs = data.runs;
  const several = new Set(runs.map((run) => run.size)).size > 1;
  const byId = (id) => document.getElementById(id);

  // Every text goes through here as a text node: names and values of runs are never markup.
  function make(tag, attributes = {}, ...children) {
    const svg = ["svg", "line", "circle", "rect", "path", "text"].includes(tag);
    const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value === true) node.setAttribute(name, "");
      else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
    }
    node.append(...children.flat().filter((child) => child !== null && child !== undefined));
    return node;
  }
  // Plotly reads a few tags in its texts.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  const state = {
    on: new Set(runs.keys()), x: "tokens", colour: "mode", marker: "none", lines: "runs", smoothing: 0, range: null, zoom: 0,
  };

  const runsOn = () => [...state.on].map((index) => runs[index]);

  // ------------------------------------------------------------------------------------------------ grouping, colours

  const modeName = (mode) => (several ? `${mode.label} (${mode.size})` : mode.label);
  const keys = {
    mode: (run) => modeName(data.modes[run.mode]),
    norm: (run) => run.norm,
    anchor: (run) => run.anchor,
    seed: (run) => String(run.seed),
    size: (run) => run.size,
  };
  const label = (run) => `${keys.mode(run)}, seed ${run.seed}`;
  const valuesOf = (key) => [...new Set(runs.map(keys[key]))];
  const varying = Object.keys(keys).filter((key) => valuesOf(key).length > 1);
  // Okabe and Ito's colours, for all kinds of colour vision, darkened for paper and lightened for the dark; grey: baseline.
  const palettes = {
    light: ["#D55E00", "#0072B2", "#009E73", "#C0568F", "#4FA8DC", "#A6761D", "#44337A", "#8C8C00"],
    dark: ["#FF8A47", "#58A9F0", "#2FC79C", "#EE9FCB", "#9AD6FA", "#E0B04A", "#B3A1F5", "#E6E05A"],
  };
  const greys = { light: "#59626B", dark: "#B4BCC4" };
  const symbols = ["circle", "square", "diamond", "triangle-up", "x", "triangle-down", "cross", "star"];
  const isDark = () => root.dataset.dark === "true";
  const theme = () => (isDark() ? "dark" : "light");
  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  function colourOf(run) {
    const base = (other) => data.modes[other.mode].baseline;
    if (["mode", "norm"].includes(state.colour) && base(run)) return greys[theme()];
    const rest = runs.filter((other) => !(["mode", "norm"].includes(state.colour) && base(other)));
    const values = [...new Set(rest.map(keys[state.colour]))];
    const palette = palettes[theme()];
    return palette[values.indexOf(keys[state.colour](run)) % palette.length];
  }
  function symbolOf(run) {
    if (state.marker === "none") return null;
    return symbols[valuesOf(state.marker).indexOf(keys[state.marker](run)) % symbols.length];
  }

  // ----------------------------------------------------------------------------------------------------------- series

  const xOf = (run, step) => (state.x === "tokens" ? step * run.tokens_per_step : step);
  function seriesOf(run, metric) {
    const found = run.series[metric];
    return found ? { steps: data.grids[found[0]], values: found[1] } : null;
  }
  function smooth(values) {
    // Exponential moving average over points, bias-corrected, so that it starts at the data.
    const decay = 1 - 1 / (1 + state.smoothing);
    let sum = 0, weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = decay * sum + (1 - decay) * value;
      weight = decay * weight + (1 - decay);
      return Number((sum / weight).toPrecision(6)); // rounding errors alone would else span an axis
    });
  }
  const exact = new Set(["gate/g", "scale/target", "val/loss"]); // smoothing would only blur these

  const bare = new Set(["gate/g", "scale/target", "radial/theory"]); // references, drawn without markers

  function runTraces(chart, line) {
    const traces = [];
    for (const run of runsOn()) {
      const series = seriesOf(run, line.metric);
      if (!series) continue;
      const colour = colourOf(run), symbol = bare.has(line.metric) ? null : symbolOf(run);
      const smoothed = state.smoothing > 0 && !exact.has(line.metric);
      const few = series.values.length < 12 && line.metric !== "gate/g";
      const trace = {
        type: "scatter", x: series.steps.map((step) => xOf(run, step)), y: series.values, name: plain(label(run)),
        legendgroup: run.name, yaxis: line.axis === 2 ? "y2" : "y",
        mode: symbol || few ? "lines+markers" : "lines",
        line: { color: colour, dash: line.dash, width: 1.6 },
        marker: { color: colour, symbol: symbol || "circle", size: 6, maxdisplayed: few ? 0 : 5 },
        hovertemplate: `${plain(label(run))}<br>${plain(line.label)} %{y:.5g}<br>${state.x} %{x:.4s}<extra></extra>`,
      };
      if (smoothed) {
        traces.push({ ...trace, mode: "lines", opacity: 0.22, line: { ...trace.line, dash: "solid", width: 1 }, hoverinfo: "skip", hovertemplate: null });
        trace.y = smooth(series.values);
      }
      traces.push(trace);
    }
    return traces;
  }

  function meanTraces(chart, line) {
    // Mean and range at the steps that all switched-on runs of a mode have.
    const traces = [];
    data.modes.forEach((mode, number) => {
      const members = runsOn().filter((run) => run.mode === number && run.series[line.metric]);
      if (!members.length) return;
      const maps = members.map((run) => {
        const series = seriesOf(run, line.metric);
        const values = state.smoothing > 0 && !exact.has(line.metric) ? smooth(series.values) : series.values;
        return new Map(series.steps.map((step, i) => [step, values[i]]));
      });
      const steps = [...maps[0].keys()].filter((step) => maps.every((map) => map.get(step) !== null && map.get(step) !== undefined));
      const columns = steps.map((step) => maps.map((map) => map.get(step)));
      const x = steps.map((step) => xOf(members[0], step));
      const colour = colourOf(members[0]);
      const shared = { type: "scatter", x, yaxis: line.axis === 2 ? "y2" : "y", legendgroup: mode.label, mode: "lines" };
      if (members.length > 1) {
        const edge = { ...shared, line: { width: 0, color: colour }, hoverinfo: "skip" };
        traces.push({ ...edge, y: columns.map((values) => Math.min(...values)) });
        traces.push({ ...edge, y: columns.map((values) => Math.max(...values)), fill: "tonexty", fillcolor: `${colour}22` });
      }
      traces.push({
        ...shared, y: columns.map((values) => values.reduce((a, b) => a + b, 0) / values.length), name: plain(modeName(mode)),
        line: { color: colour, dash: line.dash, width: 2 },
        hovertemplate: `${plain(modeName(mode))}, mean of ${members.length}<br>${plain(line.label)} %{y:.5g}<br>${state.x} %{x:.4s}<extra></extra>`,
      });
    });
    return traces;
  }

  function marks(members) {
    // Where the warmup ends and where the gate is closed; each different place once.
    const found = new Map();
    for (const run of members) {
      for (const name of ["k_warmup", "k_taper"]) if (run[name]) found.set(`${name} ${xOf(run, run[name])}`, [name, xOf(run, run[name])]);
    }
    const places = [...found.values()];
    return {
      shapes: places.map(([, x]) => ({ type: "line", xref: "x", yref: "paper", x0: x, x1: x, y0: 0, y1: 1, layer: "below", line: { color: css("--soft"), width: 1, dash: "dot" } })),
      annotations: places.length > 6 ? [] : places.map(([name, x]) => ({ text: name, x, xref: "x", y: 1, yref: "paper", yanchor: "bottom", xanchor: "center", showarrow: false, font: { size: 11, color: css("--soft") } })),
    };
  }

  const lastX = () => Math.max(1, ...runs.map((run) => Math.max(0, ...Object.values(run.series).map(([grid]) => xOf(run, data.grids[grid].at(-1))))));

  function layoutOf(options = {}) {
    const ink = css("--ink"), soft = css("--soft"), grid = css("--grid");
    const axis = { gridcolor: grid, linecolor: css("--line"), zeroline: false, tickfont: { color: soft, size: 11.5 }, title: { font: { size: 12, color: soft }, standoff: 6 }, automargin: true, nticks: 7 };
    return {
      autosize: true, showlegend: false, uirevision: state.zoom, // an axis keeps its zoom until it is reset
      hovermode: "closest", dragmode: "zoom", paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: ink }, margin: { l: 56, r: 18, t: 24, b: 42 },
      hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: ink, size: 12.5 }, align: "left" },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: soft, activecolor: ink },
      xaxis: { ...axis, title: { ...axis.title, text: state.x === "tokens" ? "training tokens" : "optimizer steps" }, tickformat: "~s", range: state.range || [0, 1.01 * lastX()] },
      yaxis: { ...axis, title: { ...axis.title, text: options.y || "" }, ...(options.log ? { type: "log" } : {}) },
      ...(options.y2 !== undefined ? { yaxis2: { ...axis, title: { ...axis.title, text: options.y2 }, tickmode: "auto", ...(options.log ? { type: "log" } : {}) } } : {}),
    };
  }
  const config = { responsive: true, displaylogo: false, doubleClick: "reset", modeBarButtons: [["toImage", "zoom2d", "pan2d", "autoScale2d", "resetScale2d"]] };

  // ----------------------------------------------------------------------------------------------------------- charts

  const plots = []; // { id, node, plot, draw(), timed }

  function frame(id, title, caption, tools = [], wide = false) {
    const plot = make("div", { class: "plot", id: `plot-${id}`, role: "img", "aria-label": `${title}. ${caption}` });
    const absent = make("p", { class: "absent" });
    const node = make("section", { id: `chart-${id}`, class: wide ? `wide ${id}` : id, "aria-labelledby": `title-${id}` },
      make("div", { class: "head" }, make("h3", { id: `title-${id}` }, title), make("div", { class: "chips" }, tools)),
      make("div", { class: "stage" }, plot), absent, make("p", { class: "caption" }, ...named(caption)));
    byId("charts").append(node);
    return { node, plot, absent };
  }
  // Metric names of a caption in the type of code.
  const named = (caption) => caption.split(/([a-z]+\/[a-z0-9_]+(?:\.<site>)?)/).map((part, i) => (i % 2 ? make("code", {}, part) : part));

  function show(target, traces, layout, why) {
    target.node.classList.toggle("empty", traces.length === 0);
    target.absent.textContent = traces.length ? "" : why;
    if (traces.length) Plotly.react(target.plot, traces, layout, config);
    else { Plotly.purge(target.plot); target.linked = false; }
  }

  function dashSample(dash) {
    const dashes = { solid: "", dash: "6 3", dot: "2 2.5", longdashdot: "8 2.5 2 2.5" };
    return make("svg", { width: 22, height: 8, "aria-hidden": "true" }, make("line", { x1: 0, x2: 22, y1: 4, y2: 4, stroke: "currentColor", "stroke-width": 2, "stroke-dasharray": dashes[dash] }));
  }

  // Buttons that switch what a chart shows: [key, name, dash, title]; none where there is nothing to choose from.
  function chipsOf(items, shown, draw) {
    return items.length < 2 ? [] : items.map(([key, name, dash, title]) => make("button", {
      type: "button", class: "chip", title, "aria-pressed": String(shown.has(key)),
      onclick: (event) => {
        shown.has(key) ? shown.delete(key) : shown.add(key);
        event.currentTarget.setAttribute("aria-pressed", String(shown.has(key)));
        draw();
      },
    }, dashSample(dash), name));
  }

  function addTimeChart(chart) {
    const wide = chart.wide;
    const present = chart.lines.filter((line) => runs.some((run) => run.series[line.metric]));
    const shown = new Set(present.filter((line) => line.shown).map((line) => line.metric));
    const nameOf = (line) => (line.axis === 2 && !chart.split ? `${line.label} (right)` : line.label);
    const chips = chipsOf(present.map((line) => [line.metric, nameOf(line), line.dash, line.metric]), shown, draw);
    const target = frame(chart.id, chart.title, chart.caption, chips, wide);
    target.node.classList.toggle("split", chart.split && present.some((line) => line.axis === 2));
    function draw() {
      const lines = present.filter((line) => shown.has(line.metric));
      const traces = lines.flatMap((line) => (state.lines === "means" ? meanTraces : runTraces)(chart, line));
      const right = traces.some((trace) => trace.yaxis === "y2");
      const layout = layoutOf({ y: chart.y, log: chart.log, ...(right ? { y2: chart.y2 } : {}) });
      const left = traces.some((trace) => trace.yaxis === "y");
      if (right && chart.split) {
        layout.yaxis.domain = left ? [0.54, 1] : [0.99, 1];
        layout.yaxis2.domain = left ? [0, 0.46] : [0, 1];
        layout.yaxis.visible = left;
        layout.xaxis.anchor = "y2";
      } else if (right) Object.assign(layout.yaxis2, { overlaying: "y", side: "right", showgrid: false, range: [-0.04, 1.04], tickvals: [0, 0.5, 1] });
      const levels = (left ? ["y"] : []).concat(right && chart.split ? ["y2"] : []).flatMap((yref) => chart.levels.map((level) => ({ type: "line", xref: "paper", yref, x0: 0, x1: 1, y0: level, y1: level, layer: "below", line: { color: css("--soft"), width: 1, dash: level === 0 ? "solid" : "dot" } })));
      for (const name of ["y", "y2"]) fitAxis(chart, layout, traces, name);
      if (chart.log) for (const name of ["y", "y2"]) ticksOfLog(layout, traces, name);
      const marked = marks(runsOn());
      layout.shapes = [...levels, ...marked.shapes];
      layout.annotations = marked.annotations;
      if (chart.wide) layout.yaxis.nticks = chart.split ? 6 : 9;
      if (chart.labelled && traces.length) labelEnds(layout, traces, target.plot);
      const missing = `Not recorded in ${runs.length > 1 ? "these runs" : "this run"}: ${chart.lines.map((line) => line.metric).join(", ")}.`;
      show(target, traces, layout, present.length === 0 ? missing : state.on.size === 0 ? "No run is switched on." : lines.length === 0 ? "No metric is switched on." : "The runs that are switched on have none of these numbers.");
      if (traces.length && !target.linked) {
        target.linked = true;
        target.plot.on("plotly_relayout", (event) => zoomAll(target.plot, event));
      }
    }
    plots.push({ id: chart.id, plot: target.plot, node: target.node, draw, timed: true });
  }

  // An untrained model's numbers would span some charts' axes, a diverged run's those of any: these fit the others.
  const diverged = new Set(runs.filter((run) => run.status === "diverged").map((run) => run.name));
  function fitAxis(chart, layout, traces, name) {
    const axis = layout[name === "y" ? "yaxis" : "yaxis2"];
    const sound = traces.filter((trace) => trace.yaxis === name && !diverged.has(trace.legendgroup));
    if (!axis || axis.range || !sound.length || (!chart.settled && sound.length === traces.filter((trace) => trace.yaxis === name).length)) return;
    const starts = runsOn().filter((run) => run.k_warmup).map((run) => xOf(run, run.k_warmup));
    const start = chart.settled && starts.length ? Math.max(...starts) : 0;
    const scale = chart.log ? Math.log10 : (y) => y;
    const values = sound.flatMap((trace) => trace.y.filter((y, i) => y !== null && trace.x[i] >= start && (!chart.log || y > 0))).map(scale);
    if (values.length < 2) return;
    const low = Math.min(...chart.levels, ...values), high = Math.max(...chart.levels, ...values);
    axis.range = [low - 0.08 * (high - low || 1), high + 0.08 * (high - low || 1)];
  }

  // 1, 2, 5 of each decade; over many decades only the decades.
  function ticksOfLog(layout, traces, name) {
    const axis = layout[name === "y" ? "yaxis" : "yaxis2"];
    const values = traces.filter((trace) => trace.yaxis === name || (name === "y" && !trace.yaxis)).flatMap((trace) => trace.y).filter((y) => y > 0);
    if (!axis || !values.length) return;
    const low = Math.floor(Math.log10(Math.min(...values))), high = Math.ceil(Math.log10(Math.max(...values)));
    const steps = high - low > 2 ? [1] : [1, 2, 5];
    Object.assign(axis, { tickmode: "array", tickvals: [...Array(high - low + 1).keys()].flatMap((k) => steps.map((step) => Number(`${step}e${low + k}`))) });
  }

  // The name of each group at the right end of its lines, moved apart where they would overlap.
  function labelEnds(layout, traces, plot) {
    const ends = new Map();
    for (const trace of traces.filter((other) => other.name && other.hoverinfo !== "skip")) {
      const run = runs.find((other) => other.name === trace.legendgroup);
      const name = run ? keys[state.colour](run) : trace.name;
      const last = trace.y.filter((y) => y !== null).at(-1);
      if (last === undefined) continue;
      const end = ends.get(name) || { name, colour: trace.line.color, values: [] };
      end.values.push(last);
      ends.set(name, end);
    }
    const width = plot.clientWidth;
    if (width < 620 || ends.size < 2 || ends.size > 12) return; // too many names would need more room than there is
    const sound = traces.filter((trace) => !diverged.has(trace.legendgroup));
    const all = (sound.length ? sound : traces).flatMap((trace) => trace.y.filter((y) => y !== null));
    const low = Math.min(-0.3, ...all), high = Math.max(0.3, ...all), pad = 0.05 * (high - low);
    layout.yaxis.range = [low - pad, high + pad];
    const gap = ((high - low + 2 * pad) * 17) / 310; // 17 of about 310 pixels
    const placed = [...ends.values()].map((end) => ({ ...end, y: end.values.reduce((a, b) => a + b, 0) / end.values.length })).sort((a, b) => a.y - b.y);
    for (let round = 0; round < 200; round++)
      for (let i = 1; i < placed.length; i++) {
        const overlap = gap - (placed[i].y - placed[i - 1].y);
        if (overlap > 0) { placed[i].y += overlap / 2; placed[i - 1].y -= overlap / 2; }
      }
    layout.margin.r = Math.min(230, 24 + 7.2 * Math.max(...placed.map((end) => end.name.length)));
    layout.annotations.push(...placed.map((end) => ({ text: plain(end.name), x: 1, xref: "paper", xanchor: "left", xshift: 4, y: end.y, yref: "y", yanchor: "middle", showarrow: false, font: { size: 12, color: end.colour } })));
  }

  let zooming = false;
  function zoomAll(origin, event) {
    const reset = event["xaxis.autorange"];
    if (zooming || (!reset && event["xaxis.range[0]"] === undefined)) return;
    zooming = true;
    state.range = reset ? null : [event["xaxis.range[0]"], event["xaxis.range[1]"]];
    const range = state.range || [0, 1.01 * lastX()];
    const others = plots.filter((other) => other.timed && (other.plot !== origin || reset) && !other.node.classList.contains("empty"));
    Promise.all(others.map((other) => Plotly.relayout(other.plot, { "xaxis.range": [...range] }))).then(() => { zooming = false; });
  }

  function addLayers() {
    const have = runs.filter((run) => run.layers);
    const kinds = [["c", "c", "solid"], ["gain", "gain", "dot"]];
    const shown = new Set(["c"]);
    const chips = have.length ? chipsOf(kinds, shown, draw) : [];
    const target = frame("layers", "Calibrated scalars by layer", data.captions.layers, chips);
    function draw() {
      const traces = [];
      for (const run of runsOn().filter((other) => other.layers))
        for (const [key, name, dash] of kinds.filter(([kind]) => shown.has(kind)))
          traces.push({
            type: "scatter", mode: "lines+markers", x: run.layers.sites, y: run.layers[key], legendgroup: run.name, name: plain(label(run)),
            line: { color: colourOf(run), dash, width: 1.3 }, marker: { color: colourOf(run), size: 6, symbol: symbolOf(run) || (key === "c" ? "circle" : "x") },
            hovertemplate: `${plain(label(run))}<br>${name} at %{x}: %{y:.4g}<extra></extra>`,
          });
      const layout = layoutOf({ y: "c, gain", log: true });
      ticksOfLog(layout, traces, "y");
      layout.xaxis = { ...layout.xaxis, type: "category", tickformat: "", title: { text: "" }, range: undefined, autorange: true, tickangle: -60, nticks: 40 };
      const why = have.length ? "No tapered run is switched on, or no metric." : `Not recorded: ${runs.length > 1 ? "no run has" : "this run has no"} calibrated norms, or none was measured after the calibration.`;
      show(target, traces, layout, why);
    }
    plots.push({ id: "layers", plot: target.plot, node: target.node, draw });
  }

  function addHeat(id, title, kinds) {
    const have = [...runs.keys()].filter((index) => runs[index][id]);
    let picked = have.find((index) => runs[index].verdict === "chasing") ?? have[0], chosen = kinds[0];
    const select = (name, values, apply) => make("select", { id: `${id}-${name}`, "aria-label": name, onchange: (event) => { apply(event.target.value); draw(); } },
      values.map(([value, text]) => make("option", { value, selected: value === picked }, text)));
    const tools = [have.length > 1 ? select("run", have.map((index) => [index, label(runs[index])]), (value) => { picked = Number(value); }) : null,
      have.length && kinds.length > 1 ? select("kind", kinds.map((kind) => [kind, kind]), (value) => { chosen = value; }) : null];
    const target = frame(id, title, data.captions[id], tools);
    target.node.classList.add("sites");
    function draw() {
      const run = runs[picked];
      const layout = layoutOf({ y: "site" });
      const traces = [];
      if (run) {
        const { sites, steps, values } = run[id];
        const at = steps.indexOf(run.k_warmup);
        const relative = chosen === "relative" && at >= 0, diverging = relative || chosen === "as it is";
        const shown = (row) => (v) => (chosen === "as it is" ? v : v === null || v <= 0 ? null : relative ? Math.log(v / row[at]) : Math.log10(v));
        const z = values.map((row) => row.map(shown(row)));
        // The steep growth from initialization would swallow all colours: they span what happens after the calibration.
        const after = relative ? z.flatMap((row) => row.slice(at)).filter((v) => v !== null).map(Math.abs) : [];
        const top = relative ? Math.max(0.25, ...after) : 0.5;
        const blueToRed = isDark() ? [[0, "#5BB0F5"], [0.5, "#22272d"], [1, "#FF8A47"]] : [[0, "#0B5FA5"], [0.5, "#F6F6F4"], [1, "#C24E00"]];
        const unit = relative ? "ln ratio" : diverging ? "ln(c · scale)" : "log10";
        traces.push({
          type: "heatmap", x: steps.map((step) => xOf(run, step)), y: sites, z, colorscale: diverging ? blueToRed : "Cividis",
          ...(diverging ? { zmin: -top, zmax: top } : {}), customdata: values,
          colorbar: { thickness: 12, outlinewidth: 0, tickfont: { size: 11, color: css("--soft") }, title: { text: unit, font: { size: 11.5, color: css("--soft") } } },
          hovertemplate: `%{y}<br>value %{customdata:.4g}<br>${unit} %{z:.3f}<br>${state.x} %{x:.4s}<extra></extra>`,
        });
        layout.yaxis = { ...layout.yaxis, type: "category", nticks: 60, title: { text: "" } };
        layout.xaxis.range = state.range || undefined;
        layout.xaxis.autorange = !state.range;
        const marked = marks([run]);
        layout.shapes = marked.shapes.map((shape) => ({ ...shape, layer: "above", line: { ...shape.line, color: css("--ink") } }));
        layout.annotations = marked.annotations;
      }
      show(target, traces, layout, `Not recorded: ${data.captions[id].split(" ")[0]}.`);
    }
    plots.push({ id, plot: target.plot, node: target.node, draw });
  }

  function addTokens() {
    const target = frame("tokens", "Radial gradient per token", data.captions.tokens);
    function draw() {
      const have = runsOn().filter((run) => run.tokens);
      const first = have.filter((run, i) => have.findIndex((other) => other.mode === run.mode) === i);
      const traces = first.map((run) => ({
        type: "scatter", mode: "markers", x: run.tokens.theory, y: run.tokens.measured, legendgroup: run.name, name: plain(label(run)),
        marker: { color: colourOf(run), size: 4, opacity: 0.6 },
        hovertemplate: `${plain(label(run))}<br>theory %{x:.4g}<br>measured %{y:.4g}<extra></extra>`,
      }));
      const all = first.flatMap((run) => [...run.tokens.theory, ...run.tokens.measured]).filter((v) => v !== null);
      const ends = [Math.min(...all), Math.max(...all)], pad = 0.04 * (ends[1] - ends[0] || 1);
      const layout = layoutOf({ y: "measured: autograd" });
      layout.xaxis = { ...layout.xaxis, title: { ...layout.xaxis.title, text: "theory: E_p[z] - z_y" }, tickformat: "", range: [ends[0] - pad, ends[1] + pad] };
      layout.shapes = [[ends, "solid"], [[0, 0], "dot"]].map(([[y0, y1], dash]) => ({ type: "line", xref: "x", yref: "y", x0: ends[0], x1: ends[1], y0, y1, layer: "below", line: { color: css("--soft"), width: 1, dash } }));
      show(target, traces, layout, state.on.size ? "Not recorded: probe_tokens.json, which a run writes at its end." : "No run is switched on.");
    }
    plots.push({ id: "tokens", plot: target.plot, node: target.node, draw });
  }

  // ------------------------------------------------------------------------------------------------- text and tables

  const swatch = (run) => make("svg", { class: "swatch", viewBox: "0 0 15 11", "aria-hidden": "true" }, make("rect", { x: 0, y: 2, width: 15, height: 7, rx: 2, fill: colourOf(run) }));

  const glyphs = { circle: "●", square: "■", diamond: "◆", "triangle-up": "▲", x: "✖", "triangle-down": "▼", cross: "✚", star: "★" };
  const markerSample = (run) => make("span", { style: `color: ${colourOf(run)}`, "aria-hidden": "true" }, glyphs[symbolOf(run) || "circle"]);

  function dots(mode, values, low, high) {
    const width = 170, height = 24, pad = 8;
    const x = (value) => pad + ((Math.min(high, Math.max(low, value)) - low) / (high - low)) * (width - 2 * pad); // far ones at the edge
    const run = runs.find((other) => other.mode === mode);
    const zone = data.growth;
    return make("svg", { class: "dots", width, height, role: "img", "aria-label": `growth of each seed: ${values.map((v) => v.toFixed(2)).join(", ")}` },
      make("rect", { class: "zone", x: x(-zone), y: 3, width: x(zone) - x(-zone), height: height - 6, rx: 3 }),
      make("line", { class: "zero", x1: x(0), x2: x(0), y1: 2, y2: height - 2 }),
      values.map((value) => make("circle", { cx: x(value), cy: height / 2, r: 5, fill: colourOf(run), "fill-opacity": 0.8, stroke: css("--card"), "stroke-width": 1 })));
  }

  function drawVerdicts() {
    const growths = runs.map((run) => run.growth).filter((value) => value !== null);
    const low = Math.max(-1.2, Math.min(-0.3, ...growths) - 0.05), high = Math.min(2, Math.max(0.3, ...growths) + 0.05);
    const icons = { chasing: "▲ ", growing: "▲ ", shrinking: "▼ ", held: "● ", inert: "– ", normed: "– ", early: "… ", diverged: "✕ ", failed: "✕ " };
    const head = ["mode", "verdict", "growth since gate 0 (grey: held)", "drift, e-folds", ...(runs.length === 1 ? ["logit norm", "validation loss"] : ["logit norm vs baseline", "validation loss vs baseline"])];
    const rows = data.modes.map((mode, number) => {
      const values = runs.filter((run) => run.mode === number && run.growth !== null).map((run) => run.growth);
      const first = runs.find((run) => run.mode === number);
      return make("tr", {},
        make("td", {}, swatch(first), modeName(mode)),
        make("td", {}, make("span", { class: `badge ${mode.verdict[0]}` }, icons[mode.verdict[0]] + mode.verdict[1])),
        make("td", { class: "drift" }, values.length ? dots(number, values, low, high) : "", make("span", {}, ...withInterval(mode.growth), ...mode.references.map((text) => make("small", {}, text)))),
        make("td", {}, ...withInterval(mode.drift)),
        ...(runs.length === 1 ? [make("td", {}, mode.logit_norm), make("td", {}, mode.val_loss)] : [
        make("td", {}, ...withInterval(mode.logit_gap)),
        make("td", {}, ...withInterval(mode.gap, mode.told === "not distinguishable" ? mode.told : ""))]));
    });
    byId("verdicts").replaceChildren(make("thead", {}, make("tr", {}, head.map((text) => make("th", {}, text)))), make("tbody", {}, rows));
  }
  function withInterval(text, told = "") {
    const [value, ...rest] = text.split(" (");
    return [value, told ? make("i", {}, told) : "", rest.length ? make("small", {}, rest.join(" (").replace(/\)$/, "")) : ""];
  }

  function drawRuns() {
    const boxes = [];
    let size = null;
    data.modes.forEach((mode, number) => {
      if (several && mode.size !== size) boxes.push(make("p", { class: "size" }, (size = mode.size)));
      const members = [...runs.keys()].filter((index) => runs[index].mode === number);
      const box = make("input", { type: "checkbox", "data-mode": number, onchange: (event) => { members.forEach((index) => toggle(index, event.target.checked)); update(); } });
      const seeds = members.map((index) => {
        const run = runs[index];
        const odd = run.status !== "finished";
        return make("label", { title: `${run.name}: ${run.status}`, class: odd ? "odd" : null },
          make("input", { type: "checkbox", "data-run": index, "aria-label": label(run), onchange: (event) => { toggle(index, event.target.checked); update(); } }),
          markerSample(run), `${run.seed}${odd ? ` ${run.status}` : ""}`);
      });
      boxes.push(make("div", { class: "group" }, make("label", {}, box, make("span", {}, mode.label)), make("div", { class: "seeds" }, seeds)));
    });
    byId("runs").replaceChildren(...boxes);
    check();
  }
  function toggle(index, on) { on ? state.on.add(index) : state.on.delete(index); state.on = new Set([...state.on].sort((a, b) => a - b)); }
  function check() {
    for (const box of document.querySelectorAll("[data-run]")) box.checked = state.on.has(Number(box.dataset.run));
    for (const box of document.querySelectorAll("[data-mode]")) {
      const members = [...runs.keys()].filter((index) => runs[index].mode === Number(box.dataset.mode));
      const on = members.filter((index) => state.on.has(index)).length;
      box.checked = on === members.length;
      box.indeterminate = on > 0 && on < members.length;
    }
    byId("count").textContent = `${state.on.size} of ${runs.length}`;
  }

  // An interval may go to a line of its own, but stays in one piece.
  const unbroken = (text) => { const found = text.match(/^([-+\d.]+ )(\(.*\))$/); return found ? [found[1], make("span", { class: "piece" }, found[2])] : [text]; };

  function drawTables() {
    for (const table of data.tables) {
      const quiet = new Set(["not distinguishable", "one pair: no interval", "one seed: no interval", "no baseline"]);
      // What goes below the column before it saves a column.
      const below = (row, column) => (table.align[column] === "s" ? [make("small", {}, row[column]), ...below(row, column + 1)] : []);
      const own = (row) => row.map((text, column) => [text, column]).filter(([, column]) => table.align[column] !== "s");
      const cell = (tag, row) => ([text, column]) => make(tag, { class: [table.align[column], quiet.has(text) ? "quiet" : "", text.length < 34 ? "own" : ""].join(" ").trim() }, ...unbroken(text), below(row, column + 1));
      const cells = (tag, row) => make("tr", {}, own(row).map(cell(tag, row)));
      byId("tables").append(make("div", { class: "table", id: `table-${table.id}` }, make("h3", {}, table.title), make("p", { class: "caption" }, ...named(table.note)),
        make("div", { class: "scroll" }, make("table", {}, make("thead", {}, cells("th", table.columns)), make("tbody", {}, table.rows.map((row) => cells("td", row)))))));
    }
  }

  // --------------------------------------------------------------------------------------------------------- controls

  let generation = 0;
  function update() {
    // One chart per turn of the event loop, so that the page stays responsive; a newer update ends an older one.
    const own = ++generation;
    root.dataset.ready = "false";
    check();
    const queue = [...plots];
    const next = () => {
      if (own !== generation) return;
      const plot = queue.shift();
      if (!plot) { root.dataset.ready = "true"; return; }
      plot.draw();
      setTimeout(next, 0);
    };
    next();
  }
  function redrawAll() { drawVerdicts(); drawRuns(); update(); }

  function options(select, names, chosen) {
    select.replaceChildren(...names.map((name) => make("option", { value: name, selected: name === chosen }, name)));
    if (names.length < 2) select.parentElement.hidden = true;
  }
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  function applyTheme() {
    const wanted = byId("theme").value;
    root.dataset.dark = String(wanted === "dark" || (wanted === "auto" && system.matches));
  }
  function bind(id, apply) { byId(id).addEventListener("change", (event) => { apply(event.target.value); redrawAll(); }); }

  byId("title").textContent = data.title;
  byId("written").textContent = `${runs.length > 1 ? `${runs.length} runs in ${data.modes.length} modes, ` : ""}written ${data.written}`;
  byId("headline").textContent = data.headline;
  byId("rule").textContent = data.rule;
  byId("uncounted").append(...data.uncounted.map((line) => make("li", {}, line)));
  byId("notes").append(...data.notes.map((line) => make("li", {}, line)));
  document.body.classList.toggle("single", runs.length === 1);
  if (runs.length > 1 && varying.includes("seed") && state.colour !== "seed") state.marker = "seed";
  if (!varying.includes("mode") && varying.length) state.colour = varying[0];
  if (state.marker === state.colour) state.marker = "none";
  options(byId("colour"), varying.length ? varying : ["mode"], state.colour);
  options(byId("marker"), ["none", ...varying], state.marker);
  bind("colour", (value) => { state.colour = value; });
  bind("marker", (value) => { state.marker = value; });
  bind("x", (value) => { state.x = value; state.range = null; state.zoom += 1; });
  bind("lines", (value) => { state.lines = value; });
  bind("smoothing", (value) => { state.smoothing = Number(value); });
  bind("theme", applyTheme);
  byId("zoom").addEventListener("click", () => { state.range = null; state.zoom += 1; update(); });
  byId("all").addEventListener("click", () => { state.on = new Set(runs.keys()); update(); });
  byId("none").addEventListener("click", () => { state.on = new Set(); update(); });
  system.addEventListener("change", () => { applyTheme(); redrawAll(); });
  let before = null;
  window.addEventListener("beforeprint", () => {
    // On white, and as wide as paper: a chart keeps the size that it is drawn with.
    before = root.dataset.dark;
    Object.assign(root.dataset, { dark: "false", print: "true" });
    drawVerdicts();
    plots.forEach((plot) => { plot.draw(); if (!plot.node.classList.contains("empty")) Plotly.Plots.resize(plot.plot); });
  });
  window.addEventListener("afterprint", () => {
    root.dataset.dark = before;
    delete root.dataset.print;
    plots.forEach((plot) => { if (!plot.node.classList.contains("empty")) Plotly.Plots.resize(plot.plot); });
    redrawAll();
  });
  const measure = () => root.style.setProperty("--top", `${document.querySelector(".top").offsetHeight}px`);
  window.addEventListener("resize", measure);
  if (window.innerWidth <= 1100) byId("panel").open = false;

  applyTheme();
  measure();
  for (const chart of data.charts) addTimeChart(chart);
  addLayers();
  addTokens();
  addHeat("heat", "Residual scale by layer", ["relative", "absolute"]);
  addHeat("mismatch", "Mismatch of the calibration by layer", ["as it is"]);
  drawTables();
  redrawAll();
})();
