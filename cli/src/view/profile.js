// The page of a profile: a row for each depth of each thread and stream. Events that are at least a pixel wide are drawn; of
// several events within one pixel, only one is drawn.

const ROW = { high: 17, gap: 7, chart: 44, gutter: 190, right: 14, axis: 24 };

/** The columns of the file and their access functions. */
class Profile {
    constructor({ meta, column }) {
        Object.assign(this, {
            texts: meta.texts,
            templates: meta.templates,
            about: meta.about,
            meta,
            start: column("start"),
            took: column("took"),
            own: column("own"),
            name: column("name"),
            category: column("category"),
            templateOf: column("template"),
            argument: column("argument"),
            numbers: column("numbers"),
            rowEnd: column("row.end"),
            rowTrack: column("row.track"),
            from: column("arrow.from"),
            to: column("arrow.to"),
            sample: { series: column("sample.series"), at: column("sample.at"), value: column("sample.value") },
        });
        this.events = this.start.length;
        this.length = 0;
        for (let e = 0; e < this.events; e++) this.length = Math.max(this.length, this.start[e] + this.took[e]);
        for (const at of this.sample.at) this.length = Math.max(this.length, at);
        this.colours = this.texts.map(hash);
    }

    template(number) {
        return JSON.parse(this.templates[number]);
    }

    /** Returns names and values of an event's arguments. */
    arguments(event) {
        let next = this.argument[event];
        return this.template(this.templateOf[event]).map(([key, text]) => [key, text === undefined ? shownNumber(key, this.numbers[next++]) : text]);
    }

    row(event) {
        return search(0, this.rowEnd.length, (row) => this.rowEnd[row] > event);
    }

    /** Returns the event that encloses another on its track, -1 for none. */
    outer(event) {
        const row = this.row(event);
        if (row === 0 || this.rowTrack[row - 1] !== this.rowTrack[row]) return -1;
        const first = row === 1 ? 0 : this.rowEnd[row - 2];
        return search(first, this.rowEnd[row - 1], (e) => this.start[e] > this.start[event]) - 1;
    }

    trackName(number) {
        const track = this.meta.tracks[number];
        const process = this.meta.processes[track.process];
        return [process.name ?? (process.id ? `process ${process.id}` : ""), track.name ?? (track.id ? `thread ${track.id}` : "")];
    }
}

function shownNumber(key, value) {
    if (key === "bytes") return `${size(value)} (${count(value)})`;
    if (key.endsWith("_us")) return time(value);
    return Number.isInteger(value) ? count(value) : String(value);
}

const page = { profile: null, colours: theme(), pinned: -1, hovered: -1, names: null, inTemplates: null };

const plot = {
    x: new Range(0, 1, 1),
    y: null,
    items: [],
    tall: 0,
    top: 0,

    open(p) {
        this.x.limit(-0.005 * p.length, 1.005 * p.length || 1, 0.01);
        let y = 0;
        for (const chart of charts(p)) {
            this.items.push({ chart, y, h: ROW.chart });
            y += ROW.chart + ROW.gap;
        }
        p.rowEnd.forEach((end, row) => {
            const begins = row === 0 || p.rowTrack[row - 1] !== p.rowTrack[row];
            if (begins && row > 0) y += ROW.gap;
            this.items.push({ row, first: row === 0 ? 0 : p.rowEnd[row - 1], end, y, h: ROW.high, begins });
            y += ROW.high;
        });
        this.tall = y;
    },

    box() {
        const { width, height } = timelineCanvas;
        return { x: ROW.gutter, y: ROW.axis, w: Math.max(10, width - ROW.gutter - ROW.right), h: Math.max(10, height - ROW.axis - 6) };
    },

    across(at) {
        const box = this.box();
        return box.x + (box.w * (at - this.x.from)) / (this.x.to - this.x.from);
    },

    changed() {
        timelineCanvas.redraw();
    },

    wheelY(by) {
        this.top = Math.max(0, Math.min(this.tall - this.box().h, this.top + by));
    },

    /** Returns the item at a height of the canvas. */
    item(y) {
        const inside = y - this.box().y + this.top;
        return y < this.box().y ? undefined : this.items.find((item) => inside >= item.y && inside < item.y + item.h);
    },

    /** Returns the event at a point, or within a few pixels of it; -1 for none. */
    at(x, y) {
        const [p, item, box] = [page.profile, this.item(y), this.box()];
        if (!item || item.chart || x < box.x || x > box.x + box.w) return -1;
        const scale = (this.x.to - this.x.from) / box.w;
        const at = this.x.from + (x - box.x) * scale;
        const next = search(item.first, item.end, (e) => p.start[e] + p.took[e] >= at);
        const far = (e) => (e < item.first || e >= item.end ? Infinity : Math.max(p.start[e] - at, at - p.start[e] - p.took[e], 0));
        const nearest = far(next) <= far(next - 1) ? next : next - 1;
        return far(nearest) <= 2 * scale ? nearest : -1;
    },

    hover(x, y, event) {
        const found = this.at(x, y);
        if (found !== page.hovered) {
            page.hovered = found;
            overlayCanvas.redraw();
        }
        const item = this.item(y);
        const box = this.box();
        if (found >= 0) tooltip.show(event.clientX, event.clientY, ...describe(found));
        else if (item && item.chart && x > box.x) tooltip.show(event.clientX, event.clientY, ...sampled(item.chart, this.x.from + ((x - box.x) / box.w) * (this.x.to - this.x.from)));
        else tooltip.hide();
    },

    left() {
        page.hovered = -1;
        overlayCanvas.redraw();
    },

    click(x, y) {
        pin(this.at(x, y));
    },

    keys: {
        "[": () => step(-1),
        "]": () => step(1),
        f: () => page.pinned >= 0 && visit(page.pinned, true),
    },
};

/** Returns the counters, each with its series: ranges of the samples. */
function charts(p) {
    const all = new Map();
    const { series, at, value } = p.sample;
    p.meta.series.forEach(([process, name, key], number) => {
        const [from, to] = [search(0, series.length, (i) => series[i] >= number), search(0, series.length, (i) => series[i] > number)];
        if (from === to) return;
        const id = `${process} ${name}`;
        if (!all.has(id)) all.set(id, { name: p.texts[name], parts: [], most: 0 });
        const chart = all.get(id);
        chart.parts.push({ key: p.texts[key], from, to });
        for (let i = from; i < to; i++) chart.most = Math.max(chart.most, value[i]);
    });
    const valueAt = (part, when) => {
        const after = search(part.from, part.to, (i) => at[i] > when);
        return after > part.from ? value[after - 1] : null;
    };
    for (const chart of all.values()) {
        chart.valueAt = valueAt;
        chart.bytes = /memory|bytes/i.test(chart.name) || chart.parts.some(({ key }) => /bytes|allocated|reserved/i.test(key));
    }
    return [...all.values()];
}

function sampled(chart, when) {
    const shown = (value) => (value === null ? null : chart.bytes ? size(value) : count(value));
    return [element("p", {}, chart.name), terms([["at", time(when)], ...chart.parts.map((part) => [part.key, shown(chart.valueAt(part, when))])])];
}

/** Describes an event. */
function describe(event) {
    const p = page.profile;
    const own = p.own[event] < p.took[event] ? time(p.own[event]) : null;
    const [process, thread] = p.trackName(p.rowTrack[p.row(event)]);
    return [
        element("p", {}, element("b", {}, p.texts[p.name[event]])),
        terms([
            ["category", p.texts[p.category[event]]],
            ["on", [process, thread].filter(Boolean).join(" · ")],
            ["at", time(p.start[event])],
            ["took", time(p.took[event])],
            ["of its own", own],
            ...p.arguments(event),
        ]),
    ];
}

function matches(event) {
    const p = page.profile;
    return page.names === null || page.names[p.name[event]] === 1 || page.inTemplates[p.templateOf[event]] === 1;
}

// ---- drawing ----------------------------------------------------------------------------------------------------------

const timelineCanvas = new Canvas($("timeline"), (context, width, height) => {
    if (!page.profile) return;
    const box = plot.box();
    plot.top = Math.max(0, Math.min(plot.tall - box.h, plot.top));
    drawScale(context, box, height);
    context.save();
    context.beginPath();
    context.rect(0, box.y, width, box.h);
    context.clip();
    for (const item of plot.items) {
        const y = box.y + item.y - plot.top;
        if (y + item.h < box.y || y > box.y + box.h) continue;
        context.save();
        if (item.chart || item.begins) drawName(context, item, y);
        context.beginPath();
        context.rect(box.x, box.y, box.w, box.h);
        context.clip();
        if (item.chart) drawChart(context, item.chart, box, y);
        else drawRow(context, item, box, y);
        context.restore();
    }
    context.restore();
    overlayCanvas.redraw();
});

function drawScale(context, box, height) {
    const { x } = plot;
    const across = ticks(Math.max(0, x.from), x.to, box.w / 110, false);
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (const value of across.all) {
        const at = Math.round(plot.across(value));
        context.fillStyle = page.colours.line;
        context.fillRect(at, box.y - 4, 1, height);
        context.fillStyle = page.colours.faint;
        context.fillText(timeTick(value, across.step), at, 11);
    }
}

function drawName(context, item, y) {
    context.textAlign = "left";
    context.textBaseline = "middle";
    const { faint, text, line } = page.colours;
    context.fillStyle = line;
    context.fillRect(0, y - 4, timelineCanvas.width, 1);
    const [process, thread] = item.chart ? ["", item.chart.name] : page.profile.trackName(page.profile.rowTrack[item.row]);
    const shown = process && thread ? `${process} · ${thread}` : process || thread;
    label(context, shown, 10, y + ROW.high / 2, ROW.gutter - 18, item.chart ? faint : text);
    if (item.chart) label(context, `at most ${item.chart.bytes ? size(item.chart.most) : count(item.chart.most)}`, 10, y + ROW.high * 1.5, ROW.gutter - 18, faint);
}

/** Cuts a text to a width. */
function label(context, text, x, y, width, colour) {
    context.fillStyle = colour;
    const fits = Math.floor(width / 6.2);
    if (fits >= 2) context.fillText(text.length > fits ? `${text.slice(0, fits - 1)}…` : text, x, y, width);
}

function drawRow(context, item, box, y) {
    const p = page.profile;
    const { from, to } = plot.x;
    const scale = (to - from) / box.w;
    const { names, dark } = page.colours;
    const colours = names.map(css);
    const ink = dark ? "#0c1016" : "#101820";
    context.textAlign = "left";
    context.textBaseline = "middle";
    let e = search(item.first, item.end, (k) => p.start[k] + p.took[k] >= from);
    while (e < item.end && p.start[e] < to) {
        const left = box.x + (p.start[e] - from) / scale;
        const wide = p.took[e] / scale;
        let [shown, next] = [e, e + 1];
        if (wide < 1) {
            const edge = from + (Math.floor(left - box.x) + 1) * scale;
            next = search(e + 1, item.end, (k) => p.start[k] + p.took[k] > edge);
            for (let k = e; page.names !== null && k < next; k++) if (matches(k)) [shown, k] = [k, next];
        }
        context.globalAlpha = matches(shown) ? 1 : 0.15;
        context.fillStyle = colours[p.colours[p.name[shown]]];
        const [l, r] = [Math.max(left, box.x - 2), Math.min(left + wide, box.x + box.w + 2)];
        context.fillRect(wide < 1 ? Math.floor(l) : l, y, Math.max(1, r - l - (wide > 3 ? 0.5 : 0)), ROW.high - 1);
        if (r - l > 24) label(context, p.texts[p.name[shown]], l + 4, y + ROW.high / 2 - 0.5, r - l - 7, ink);
        e = next;
    }
    context.globalAlpha = 1;
}

function drawChart(context, chart, box, y) {
    const { at, value } = page.profile.sample;
    const { from, to } = plot.x;
    const high = (bytes) => y + ROW.chart - 2 - ((ROW.chart - 6) * bytes) / (chart.most || 1);
    chart.parts.forEach((part, number) => {
        context.beginPath();
        let [i, last] = [search(part.from, part.to, (k) => at[k] > from), 0];
        if (i > part.from) last = value[i - 1];
        context.moveTo(box.x, high(last));
        for (let column = 0; column < box.w; column++) {
            const end = from + ((column + 1) / box.w) * (to - from);
            let most = last;
            for (; i < part.to && at[i] < end; i++) {
                last = value[i];
                most = Math.max(most, last);
            }
            context.lineTo(box.x + column, high(most));
            context.lineTo(box.x + column + 1, high(most));
        }
        context.strokeStyle = css(page.colours.names[hash(part.key)]);
        context.lineWidth = 1.5;
        context.stroke();
        if (number > 0) return;
        context.lineTo(box.x + box.w, high(0));
        context.lineTo(box.x, high(0));
        context.globalAlpha = 0.35;
        context.fillStyle = context.strokeStyle;
        context.fill();
        context.globalAlpha = 1;
    });
}

const overlayCanvas = new Canvas($("overlay"), (context) => {
    const p = page.profile;
    if (!p) return;
    const box = plot.box();
    context.beginPath();
    context.rect(box.x, box.y, box.w, box.h);
    context.clip();
    const offset = plot.items.length - p.rowEnd.length;
    const height = (event) => box.y + plot.items[offset + p.row(event)].y - plot.top;
    const around = (event, colour) => {
        context.strokeStyle = colour;
        context.lineWidth = 2;
        const left = plot.across(p.start[event]);
        context.strokeRect(left - 1, height(event) - 1, Math.max(3, plot.across(p.start[event] + p.took[event]) - left + 1), ROW.high + 1);
    };
    const event = page.hovered >= 0 ? page.hovered : page.pinned;
    if (event >= 0) drawArrows(context, event, height);
    if (page.pinned >= 0) around(page.pinned, page.colours.accent);
    if (page.hovered >= 0) around(page.hovered, page.colours.text);
});

/** Draws arrows that begin in an event or in events nested inside it, and arrows that end at it. */
function drawArrows(context, event, height) {
    const p = page.profile;
    const track = p.rowTrack[p.row(event)];
    const [begin, end] = [p.start[event], p.start[event] + p.took[event]];
    const within = (other) => other === event || (p.start[other] >= begin && p.start[other] + p.took[other] <= end && p.rowTrack[p.row(other)] === track);
    context.strokeStyle = context.fillStyle = page.colours.accent;
    context.lineWidth = 1.5;
    for (let i = 0, drawn = 0; i < p.from.length && drawn < 100; i++) {
        if (p.to[i] !== event && !within(p.from[i])) continue;
        drawn++;
        const [x0, y0] = [plot.across(p.start[p.from[i]] + p.took[p.from[i]] / 2), height(p.from[i]) + ROW.high / 2];
        const [x1, y1] = [plot.across(p.start[p.to[i]]), height(p.to[i]) + ROW.high / 2];
        const bend = Math.max(20, Math.abs(x1 - x0) / 2);
        context.beginPath();
        context.moveTo(x0, y0);
        context.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
        context.stroke();
        context.beginPath();
        context.moveTo(x1 + 1, y1);
        context.lineTo(x1 - 7, y1 - 4);
        context.lineTo(x1 - 7, y1 + 4);
        context.fill();
    }
}

// ---- the page ---------------------------------------------------------------------------------------------------------

function pin(event) {
    page.pinned = event;
    $("event").replaceChildren(...(event < 0 ? [element("p", { className: "hint" }, "Point at an event to see what it is; click to keep it here.")] : describe(event)));
    if (event >= 0) showTab("event");
    overlayCanvas.redraw();
}

/** Moves to the event before or after the pinned event. */
function step(by) {
    const p = page.profile;
    if (page.pinned < 0) return;
    const row = p.row(page.pinned);
    const [first, end] = [row === 0 ? 0 : p.rowEnd[row - 1], p.rowEnd[row]];
    pin(Math.max(first, Math.min(end - 1, page.pinned + by)));
    visit(page.pinned, false);
}

/** Scrolls to an event; `fit` zooms until it is a third of the visible range. */
function visit(event, fit) {
    const p = page.profile;
    const [from, to] = [p.start[event], p.start[event] + p.took[event]];
    const span = fit ? 3 * (to - from) : plot.x.to - plot.x.from;
    if (fit || to < plot.x.from || from > plot.x.to) plot.x.show((from + to - span) / 2, (from + to + span) / 2);
    const item = plot.items[plot.items.length - p.rowEnd.length + p.row(event)];
    if (item.y < plot.top || item.y + item.h > plot.top + plot.box().h) plot.top = item.y - plot.box().h / 3;
    timelineCanvas.redraw();
}

/** Puts a text into the search field. */
function find(text) {
    $("search").value = text;
    $("search").dispatchEvent(new Event("input"));
}

/** Highlights and lists the events whose name or arguments contain a text. */
function mark(text) {
    const p = page.profile;
    const having = (texts) => Uint8Array.from(texts, (t) => (t.toLowerCase().includes(text) ? 1 : 0));
    [page.names, page.inTemplates] = text ? [having(p.texts), having(p.templates)] : [null, null];
    const found = [];
    let took = 0;
    for (let e = 0; text && e < p.events; e++) {
        if (!matches(e)) continue;
        found.push(e);
        took += p.took[e];
    }
    found.sort((a, b) => p.took[b] - p.took[a] || a - b);
    const said = `${number(found.length, "events")}, ${time(took)}`;
    $("found").textContent = text ? said : "";
    const list = element("ul", { className: "rows" });
    fillList(list, found, (event) => {
        const row = element("button", { type: "button" }, element("b", {}, time(p.took[event])), element("span", {}, p.texts[p.name[event]]), element("i", {}, time(p.start[event])));
        row.onclick = () => {
            pin(event);
            visit(event, false);
        };
        return row;
    });
    $("matches").replaceChildren(element("p", { className: "hint" }, text ? `“${text}”: ${said}` : "What a search finds is listed here, the longest first."), list);
    if (text) showTab("matches");
    timelineCanvas.redraw();
}

async function start() {
    const data = await load();
    const p = (page.profile = new Profile(data));
    document.title = `${data.meta.name} · profile`;
    $("name").textContent = data.meta.name;
    const sums = summarise(p);
    table.rows = sums.rows;
    if (sums.device === 0) table.sorted = "own";
    const bold = (text) => element("b", {}, text);
    const said = [bold(time(p.length)), ` · ${number(p.events, "events")} on ${number(new Set(p.rowTrack).size, "tracks")}`];
    if (sums.device > 0) said.push(" · ", bold(time(sums.device)), ` on devices, ${((100 * sums.device) / p.length).toFixed(0)} % of the time`);
    for (const device of p.about?.devices || []) said.push(` · ${device.device} ${device.name}`);
    if (p.about?.dropped > 0) said.push(` · ${number(p.about.dropped, "earlier events")} lost`);
    $("summary").replaceChildren(...said);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (page.colours = theme()));
    startTabs();
    startKeys(() => pin(-1));
    startSearch(mark);
    control($("timeline"), plot);
    pin(-1);
    fillTable();
    plot.open(p);
    // The plot is as high as the tracks; the table gets the rest.
    document.querySelector(".plot").style.flex = `0 1 ${Math.max(200, plot.tall + ROW.axis + 14)}px`;
    timelineCanvas.now();
    drawn();
}

start().catch(failed);
