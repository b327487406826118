"use strict";
(() => {
  const record = JSON.parse(document.getElementById("record").textContent);
  const steps = record.steps;
  const last = record.frames.length - 1; // JAX environments also have a frame after the last action
  const by = (id) => document.getElementById(id);
  const DECADES = 2; // of the logarithmic scale

  // --- state -------------------------------------------------------------------------------------
  let now = 0;
  let timer = null;
  const redraw = []; // called with the step, at every change

  function show(step) {
    now = Math.max(0, Math.min(Math.max(last, steps - 1), step));
    const t = Math.min(now, steps - 1);
    by("slider").value = now;
    by("frame").src = "data:image/png;base64," + record.frames[Math.min(now, last)];
    by("clock").textContent = now < steps
      ? `step ${now} of ${steps - 1}, reward ${record.reward[t]}`
      : `the end: return ${record.total}`;
    redraw.forEach((draw) => draw(t));
  }

  function pause() {
    clearInterval(timer);
    timer = null;
    by("play").textContent = "Play";
  }

  function play() {
    if (now >= +by("slider").max) show(0);
    by("play").textContent = "Pause";
    timer = setInterval(() => {
      show(now + 1);
      if (now >= +by("slider").max) pause();
    }, 1000 / record.speed);
  }

  const toggle = () => (timer === null ? play() : pause());

  // --- drawing -----------------------------------------------------------------------------------
  const colour = (name) =>
    getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

  function surface(canvas) {
    const scale = window.devicePixelRatio || 1;
    const width = canvas.clientWidth, height = canvas.clientHeight;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "11px system-ui, sans-serif";
    return { pen, width, height };
  }

  const LEFT = 44, BOTTOM = 16, TOP = 8;
  const short = (x) => (x === 0 ? "0" : Math.abs(x) >= 0.01 && Math.abs(x) < 1000
    ? String(+x.toPrecision(3)) : x.toExponential(1));
  const across = (i, width) => LEFT + ((i + 0.5) / steps) * (width - LEFT - 4);

  function axes(pen, width, height, low, high) {
    pen.strokeStyle = colour("edge");
    pen.fillStyle = colour("soft");
    pen.beginPath();
    pen.moveTo(LEFT, TOP);
    pen.lineTo(LEFT, height - BOTTOM);
    pen.lineTo(width - 4, height - BOTTOM);
    pen.stroke();
    pen.textAlign = "right";
    pen.fillText(high, LEFT - 5, TOP + 8);
    pen.fillText(low, LEFT - 5, height - BOTTOM);
    pen.textAlign = "center";
    const every = Math.max(1, Math.ceil(steps / 10 / 5) * 5);
    for (let i = 0; i < steps; i += every) pen.fillText(i, across(i, width), height - 3);
  }

  function cursor(pen, x, top, bottom) {
    pen.strokeStyle = colour("mark");
    pen.lineWidth = 1.5;
    pen.beginPath();
    pen.moveTo(x, top);
    pen.lineTo(x, bottom);
    pen.stroke();
    pen.lineWidth = 1;
  }

  function drawValue(t) {
    const { pen, width, height } = surface(by("value"));
    const low = Math.min(...record.value), high = Math.max(...record.value);
    axes(pen, width, height, short(low), short(high));
    const y = (v) => height - BOTTOM - ((v - low) / (high - low || 1)) * (height - BOTTOM - TOP - 4);
    pen.strokeStyle = colour("main");
    pen.lineWidth = 2;
    pen.beginPath();
    record.value.forEach((v, i) => pen.lineTo(across(i, width), y(v)));
    pen.stroke();
    pen.lineWidth = 1;
    cursor(pen, across(t, width), TOP, height - BOTTOM);
    pen.fillStyle = colour("ink");
    pen.textAlign = t > steps / 2 ? "right" : "left";
    pen.fillText(short(record.value[t]), across(t, width) + (t > steps / 2 ? -5 : 5), TOP + 8);
  }

  // 0 to 1 on an axis that ends at the step's limit; larger values are clipped.
  const linear = (values, t) =>
    values.map((v) => Math.min(1, v / Math.max(record.tops[t], 1e-30)));
  const logarithmic = (values, t) =>
    linear(values, t).map((v) => Math.max(0, 1 + Math.log10(Math.max(v, 1e-30)) / DECADES));
  const scales = [record.saliency.map(linear), record.saliency.map(logarithmic)];
  const lines = () => scales[by("log").checked ? 1 : 0];

  function drawLine(t) {
    const { pen, width, height } = surface(by("line"));
    const raw = record.saliency[t], line = lines()[t], top = record.tops[t];
    axes(pen, width, height, by("log").checked ? short(top / 10 ** DECADES) : "0", short(top));
    const step = (width - LEFT - 4) / steps, bottom = height - BOTTOM, room = bottom - TOP - 10;
    line.forEach((v, i) => {
      pen.fillStyle = colour(i === t ? "soft" : "second");
      const wide = Math.max(1, step * 0.8);
      pen.fillRect(across(i, width) - wide / 2, bottom - v * room, wide, v * room);
      if (raw[i] <= top * 1.001) return;
      pen.fillStyle = colour("ground"); // a clipped bar, with its value above
      pen.fillRect(across(i, width) - wide / 2, bottom - 0.85 * room, wide, 3);
      pen.textAlign = i > steps - 3 ? "right" : "center";
      pen.fillStyle = colour("ink");
      pen.fillText(short(raw[i]), across(i, width), bottom - room - 1);
    });
    cursor(pen, across(t, width), TOP, bottom);
    const most = raw.slice(0, t).map((v, i) => [v, i]).sort((a, b) => b[0] - a[0]).slice(0, 3);
    by("peak").textContent = t === 0
      ? "Grey is the present observation; there is no past one yet."
      : "Of the past, most: " + most.map(([v, i]) => `observation ${i} (${short(v)})`).join(", ") +
        `; the present one, grey: ${short(raw[t])}.`;
  }

  function drawMap(t) {
    const { pen, width, height } = surface(by("map"));
    const wide = (width - LEFT - 4) / steps, high = (height - BOTTOM - TOP) / steps;
    axes(pen, width, height, String(steps - 1), "0");
    pen.fillStyle = colour("second");
    lines().forEach((line, row) => line.forEach((v, i) => {
      pen.globalAlpha = v;
      pen.fillRect(LEFT + i * wide, TOP + row * high, wide + 0.3, high + 0.3);
    }));
    pen.globalAlpha = 1;
    pen.strokeStyle = colour("mark");
    pen.strokeRect(LEFT, TOP + t * high, width - LEFT - 4, Math.max(high, 2));
  }

  // --- actions -----------------------------------------------------------------------------------
  function bar(name, share, text, taken) {
    const row = document.createElement("div");
    row.className = "bar" + (taken ? " taken" : "");
    const label = document.createElement("span");
    label.textContent = name;
    const track = document.createElement("div");
    track.className = "track";
    const fill = document.createElement("div");
    fill.className = "fill";
    fill.style.width = `${100 * share}%`;
    track.append(fill);
    const number = document.createElement("span");
    number.textContent = text;
    row.append(label, track, number);
    return row;
  }

  const numbers = record.actions.flatMap((a) => a.numbers || []);
  const lowest = Math.min(...numbers.flatMap((n) => [n.low, n.taken]));
  const highest = Math.max(...numbers.flatMap((n) => [n.high, n.taken]));

  function drawActions(t) {
    const rows = [];
    const names = record.about.actions || [];
    (record.actions[t].choices || []).forEach((part, k, all) => part.chances.forEach((p, i) => {
      const name = all.length > 1 ? `part ${k + 1}: ${i}` : names[i] || `action ${i}`;
      rows.push(bar(name, p, p.toFixed(3), i === part.taken));
    }));
    (record.actions[t].numbers || []).forEach((n, k) => {
      const place = (x) => (x - lowest) / (highest - lowest || 1);
      const row = bar(`number ${k + 1}`, place(n.high) - place(n.low), short(n.taken), false);
      row.querySelector(".fill").style.marginLeft = `${100 * place(n.low)}%`;
      const point = document.createElement("div");
      point.className = "point";
      point.style.left = `${100 * place(n.taken)}%`;
      row.querySelector(".track").append(point);
      rows.push(row);
    });
    by("actions").replaceChildren(...rows);
  }

  // --- memory ------------------------------------------------------------------------------------
  // Bars from 0 to `most` over time, with the value at t; if `most` is null, brightness 0 to 1.
  function strip(canvas, values, most, tint, t) {
    const { pen, width, height } = surface(canvas);
    const wide = width / steps;
    pen.fillStyle = colour(tint);
    for (let i = 0; i < values.length; i++) {
      const v = Math.max(0, Math.min(1, values[i] / (most || 1)));
      pen.globalAlpha = most === null ? v : 0.4;
      const high = most === null ? height : v * height;
      pen.fillRect(i * wide, height - high, wide + 0.3, high);
    }
    pen.globalAlpha = 1;
    cursor(pen, (t + 0.5) * wide, 0, height);
    if (most === null) return;
    pen.fillStyle = colour("ink");
    pen.textAlign = t > steps / 2 ? "right" : "left";
    pen.fillText(short(values[t]), (t + 0.5) * wide + (t > steps / 2 ? -4 : 4), 10);
  }

  function addRow(box, row, reads, most) {
    const line = document.createElement("div");
    line.className = "row" + (reads ? " reads" : "");
    const name = document.createElement("span");
    name.textContent = row.name;
    const past = Uint8Array.from(atob(row.past), (c) => c.charCodeAt(0));
    const left = (t) => {
      const begin = (t * (t + 1)) / 2;
      return Array.from(past.subarray(begin, begin + t + 1), (v) => v / 255);
    };
    const canvases = (reads ? ["past"] : ["written", "kept", "past"]).map((what) => {
      const canvas = document.createElement("canvas");
      canvas.title = what;
      canvas.onclick = (event) => show(Math.floor((event.offsetX / canvas.clientWidth) * steps));
      return canvas;
    });
    line.append(name, ...canvases);
    if (!reads) {
      const horizon = document.createElement("span");
      horizon.className = "number";
      horizon.textContent = row.horizon.map((x) => (x >= 1e5 ? "indefinite" : short(x))).join(" · ");
      line.append(horizon);
    }
    box.append(line);
    redraw.push((t) => {
      if (!reads) {
        strip(canvases[0], row.written, most, "main", t);
        strip(canvases[1], row.kept, 1, "main", t);
      }
      // Attention weights are scaled so that the largest is brightest.
      const values = left(t);
      const top = reads ? Math.max(...values, 1e-9) : 1;
      strip(canvases[canvases.length - 1], values.map((v) => v / top), null, "second", t);
    });
  }

  function addLayers() {
    const box = by("layers");
    const layers = record.layers;
    const reads = layers.length > 0 && layers[0].reads;
    by("legend").textContent = layers.length === 0
      ? "This memory has neither gates nor attention weights to show."
      : reads
        ? "Attention weights of all past inputs at this step (the brightest is the largest)."
        : "Written and kept: the fraction of the input that is written and the fraction of the " +
          "state that is kept at each step, mean over the units. Left: the fraction of what each " +
          "past input wrote that is left at this step, by brightness. Horizon: for how many " +
          "steps the units keep an input (10 %, 50 % and 90 % of them keep it for less).";
    layers.forEach((layer) => {
      const title = document.createElement("h3");
      title.textContent = layer.name;
      box.append(title);
      if (!layer.reads) {
        const head = document.createElement("div");
        head.className = "row head";
        ["", "written", "kept", "left of each input", "horizon in steps"].forEach((text) => {
          const cell = document.createElement("span");
          cell.textContent = text;
          head.append(cell);
        });
        box.append(head);
      }
      const most = Math.max(...layer.rows.flatMap((row) => row.written || [1]));
      layer.rows.forEach((row) => addRow(box, row, layer.reads, most));
    });
  }

  // Over the steps of training, not of the episode.
  function drawPast() {
    const { steps: at, fractions } = record.past, { pen, width, height } = surface(by("fraction"));
    const high = Math.max(...fractions, 1e-4), bottom = height - BOTTOM, end = at[at.length - 1];
    pen.fillStyle = colour("soft");
    pen.fillText(short(high), 0, TOP + 8);
    pen.fillText("0", 0, bottom);
    pen.textAlign = "right";
    pen.fillText(`${end.toLocaleString("en")} steps`, width, height - 2);
    pen.strokeStyle = colour("main");
    pen.lineWidth = 2;
    pen.beginPath();
    fractions.forEach((v, i) =>
      pen.lineTo(LEFT + (at[i] / end) * (width - LEFT - 4), bottom - (v / high) * (bottom - TOP)));
    pen.stroke();
    pen.lineWidth = 1;
  }

  function addPast() {
    if (!record.past) return;
    const all = record.past.fractions, percent = (x) => `${(100 * x).toFixed(1)}%`;
    const mean = all.reduce((a, b) => a + b) / all.length;
    by("past").hidden = false;
    by("share").textContent =
      `${percent(all[all.length - 1])} at the end, ${percent(mean)} on average: |p| / (|p| + |g|), ` +
      "g the gradient inside the rollouts, p what traces add.";
    redraw.push(drawPast);
  }

  // --- start -------------------------------------------------------------------------------------
  by("title").textContent = record.about.title;
  document.title = record.about.title;
  by("about").textContent = record.about.text;
  by("slider").max = Math.max(last, steps - 1);
  addLayers();
  redraw.push(drawActions, drawValue, drawLine, drawMap);
  addPast();

  by("play").onclick = toggle;
  by("slider").oninput = (event) => { pause(); show(+event.target.value); };
  by("log").onchange = () => show(now);
  by("map").onclick = (event) => {
    const high = (by("map").clientHeight - BOTTOM - TOP) / steps;
    show(Math.floor((event.offsetY - TOP) / high));
  };
  document.onkeydown = (event) => {
    if (event.target.tagName === "INPUT" || event.target.tagName === "BUTTON") return;
    if (event.key === " ") { event.preventDefault(); toggle(); }
    if (event.key === "ArrowRight") { pause(); show(now + 1); }
    if (event.key === "ArrowLeft") { pause(); show(now - 1); }
  };
  window.onresize = () => show(now);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show(now));
  window.watch = { show, record, get step() { return now; }, get playing() { return timer !== null; } };
  show(0);
})();
