// The plot of memory over time, and the bars of segments. An allocation is a band; the bands of live allocations are stacked in the
// order of allocation. A column of pixels shows the state with the most bytes in its span of time, so that no peak is lost. Of that
// state only the bands at pixel centres are drawn: the work depends on the number of pixels, not of allocations.

const MARGIN = { left: 76, right: 14, top: 12, axis: 22, span: 15 };

const plot = {
    x: new Range(0, 1, 1),
    y: new Range(0, 1, 1),
    ids: new Int32Array(0),
    states: new Int32Array(0),
    wide: 0,
    high: 0,
    spans: [],
    rows: 0,

    open(d) {
        this.byTime = $("axis").value === "time" && d.times !== null && d.events > 0 && d.times[d.events - 1] > 0;
        const last = this.byTime ? d.times[d.events - 1] : d.events;
        this.x.limit(-0.01 * last, 1.01 * last || 1, this.byTime ? 0.5 : 2);
        // If far more is reserved than used, scale to the used memory, so that it stays visible.
        const most = 1.06 * Math.max(d.mostReserved, d.used[d.peak]) || 1;
        this.y.limit(0, most, 16, Math.min(most, 3 * d.used[d.peak] || most));
        this.sums = new Sums(d.blocks);
        this.spans = layers(this.byTime || !d.times ? d.about.spans : d.about.spans.map(([name, from, to]) => [name, this.after(from), this.after(to)]));
        this.rows = Math.min(4, this.spans.reduce((most, span) => Math.max(most, span.depth + 1), 0));
    },

    /** Returns the number of events up to a time. */
    after(at) {
        const { times, events } = page.device;
        return search(0, events, (e) => times[e] > at);
    },

    /** Returns the position at which a state begins. */
    place(state) {
        if (state <= 0) return this.x.least;
        const event = Math.min(state, page.device.events) - 1;
        return this.byTime ? page.device.times[event] : event;
    },

    /** Returns the state at a position: the number of events that begin at or before the position, or only before it. */
    stateAt(at, before) {
        const d = page.device;
        if (this.byTime) return search(0, d.events, (e) => (before ? d.times[e] >= at : d.times[e] > at));
        return Math.max(0, Math.min(d.events, before ? Math.ceil(at) : Math.floor(at) + 1));
    },

    box() {
        const { width, height } = timelineCanvas;
        const bottom = MARGIN.axis + this.rows * MARGIN.span;
        return { x: MARGIN.left, y: MARGIN.top, w: Math.max(10, width - MARGIN.left - MARGIN.right), h: Math.max(10, height - MARGIN.top - bottom) };
    },

    changed() {
        timelineCanvas.redraw();
    },

    /** Returns the block at a point, -1 for none. */
    at(x, y) {
        const [box, ratio] = [this.box(), timelineCanvas.ratio];
        const [column, row] = [Math.floor((x - box.x) * ratio), Math.floor((y - box.y) * ratio)];
        if (column < 0 || column >= this.wide || row < 0 || row >= this.high) return -1;
        return this.ids[row * this.wide + column] - 1;
    },

    /** Returns the state that is drawn at a point, null outside the plot. */
    shown(x) {
        const column = Math.floor((x - this.box().x) * timelineCanvas.ratio);
        return column >= 0 && column < this.wide ? this.states[column] : null;
    },

    hover(x, y, event) {
        const d = page.device;
        const [block, state, box] = [this.at(x, y), this.shown(x), this.box()];
        [page.hovered, this.cursor] = [block, state === null || y < box.y || y > box.y + box.h ? null : x];
        overlayCanvas.redraw();
        const span = y > box.y + box.h && this.spanAt(x, y);
        if (block >= 0) {
            tooltip.show(event.clientX, event.clientY, ...describe(block, 14));
        } else if (span) {
            tooltip.show(event.clientX, event.clientY, element("p", {}, span.name), terms([["took", this.byTime ? time(span.to - span.from) : number(span.to - span.from, "events")]]));
        } else if (this.cursor !== null) {
            tooltip.show(event.clientX, event.clientY, terms([["at", d.moment(state - 1)], ["in use", size(d.used[state])], ["reserved", size(d.reserved[state])]]));
        } else {
            tooltip.hide();
        }
    },

    left() {
        [page.hovered, this.cursor] = [-1, null];
        overlayCanvas.redraw();
    },

    click(x, y) {
        const state = this.shown(x);
        if (state === null) return;
        choose(state);
        pin(this.at(x, y));
    },

    spanAt(x, y) {
        const box = this.box();
        const row = Math.floor((y - box.y - box.h - MARGIN.axis) / MARGIN.span);
        const at = this.x.from + ((x - box.x) / box.w) * (this.x.to - this.x.from);
        return this.spans.find((span) => span.depth === row && span.from <= at && at < span.to);
    },

    keys: {
        ",": () => choose(page.moment - 1),
        ".": () => choose(page.moment + 1),
        "[": () => step(-1),
        "]": () => step(1),
        p: () => choose(page.device.peak),
    },
};

/** Computes the nesting depth of spans, which are sorted by their start. */
function layers(spans) {
    const ends = [];
    const sorted = spans.map(([name, from, to]) => ({ name, from, to })).sort((a, b) => a.from - b.from || b.to - a.to);
    for (const span of sorted) {
        while (ends.length > 0 && ends[ends.length - 1] <= span.from) ends.pop();
        span.depth = ends.length;
        ends.push(span.to);
    }
    return sorted;
}

const timelineCanvas = new Canvas($("timeline"), (context, width, height) => {
    if (!page.device) return;
    const box = plot.box();
    drawBands(context, box);
    drawAxes(context, box, width, height);
    overlayCanvas.redraw();
});

/** Draws the bands, pixel by pixel of the screen, and the reserved memory above them. */
function drawBands(context, box) {
    const d = page.device;
    const ratio = timelineCanvas.ratio;
    const [wide, high] = [Math.round(box.w * ratio), Math.round(box.h * ratio)];
    const image = new ImageData(wide, high);
    const pixels = new Uint32Array(image.data.buffer);
    const ids = new Int32Array(wide * high);
    const states = new Int32Array(wide);
    const reserved = new Float64Array(wide);
    const colours = bandColours();
    const { x, y } = plot;
    const bytes = (y.to - y.from) / high;
    const { sums } = plot;
    const { used, change, size: sizes, colour, requested } = d;
    const marked = page.marked;

    let now = plot.stateAt(x.from, false);
    sums.clear();
    for (let b = 0; b < d.blocks; b++) if (d.lives(b, now)) sums.add(b, sizes[b]);
    const advance = (to) => {
        for (; now < to; now++) {
            const c = change[now];
            if (c > 0) sums.add(c - 1, sizes[c - 1]);
            else if (c < 0) sums.add(-c - 1, -sizes[-c - 1]);
        }
    };
    let first = now;
    for (let column = 0; column < wide; column++) {
        const last = plot.stateAt(x.from + ((column + 1) / wide) * (x.to - x.from), true);
        let best = first;
        for (let s = first; s <= last; s++) {
            if (used[s] > used[best]) best = s;
            if (d.reserved[s] > reserved[column]) reserved[column] = d.reserved[s];
        }
        states[column] = best;
        first = Math.max(first, last);
        if (column > 0 && best === states[column - 1]) {
            for (let at = column; at < pixels.length; at += wide) [pixels[at], ids[at]] = [pixels[at - 1], ids[at - 1]];
            continue;
        }
        advance(best);
        for (let row = 0; row < high; ) {
            const block = sums.find(y.from + (row + 0.5) * bytes);
            if (block < 0) break;
            const top = (sums.below + sizes[block] - y.from) / bytes;
            const end = Math.max(row + 1, Math.min(high, Math.ceil(top - 0.5)));
            const shade = marked && !marked[block] ? colours.dim : requested[block] < best ? colours.pale : colours.full;
            const [inside, edge] = [shade.inside[colour[block]], shade.edge[colour[block]]];
            const lined = end - row >= 4 * ratio;
            for (let at = (high - 1 - row) * wide + column; row < end; row++, at -= wide) {
                pixels[at] = lined && row >= end - ratio ? edge : inside;
                ids[at] = block + 1;
            }
        }
    }
    context.putImageData(image, Math.round(box.x * ratio), Math.round(box.y * ratio));
    Object.assign(plot, { ids, states, wide, high });
    drawReserved(context, box, reserved);
}

/** Returns the colours of bands, also for freed memory still in use by a stream, and for bands that a search does not match. */
function bandColours() {
    const { names, plot: ground, dark } = page.colours;
    const shade = (change) => {
        const all = names.map(change);
        return { inside: Uint32Array.from(all, pixel), edge: Uint32Array.from(all, (c) => pixel(mix(c, dark ? [0, 0, 0] : [255, 255, 255], 0.45))) };
    };
    const grey = dark ? [66, 74, 86] : [214, 218, 224];
    return { full: shade((c) => c), pale: shade((c) => mix(c, ground, 0.55)), dim: shade((c) => mix(grey, c, 0.12)) };
}

function drawReserved(context, box, reserved) {
    const { y } = plot;
    const d = page.device;
    if (d.mostReserved === 0) return;
    const high = (bytes) => box.y + box.h * (1 - (bytes - y.from) / (y.to - y.from));
    context.save();
    context.beginPath();
    context.rect(box.x, box.y, box.w, box.h);
    context.clip();
    context.beginPath();
    reserved.forEach((bytes, column) => {
        const at = box.x + column / timelineCanvas.ratio;
        context.lineTo(at, high(bytes));
        context.lineTo(at + 1 / timelineCanvas.ratio, high(bytes));
    });
    context.strokeStyle = page.colours.text;
    context.lineWidth = 1.5;
    context.stroke();
    for (let column = reserved.length; column-- > 0; ) context.lineTo(box.x + column / timelineCanvas.ratio, high(d.used[plot.states[column]]));
    context.closePath();
    context.globalAlpha = 0.06;
    context.fillStyle = page.colours.text;
    context.fill();
    context.restore();
}

function drawAxes(context, box, width, height) {
    const { x, y } = plot;
    const { text, faint, line } = page.colours;
    context.strokeStyle = line;
    context.fillStyle = faint;
    context.lineWidth = 1;
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const bytes of ticks(y.from, y.to, box.h / 50, true).all) {
        const at = Math.round(box.y + box.h * (1 - (bytes - y.from) / (y.to - y.from))) + 0.5;
        context.globalAlpha = 0.5;
        context.beginPath();
        context.moveTo(box.x, at);
        context.lineTo(box.x + box.w, at);
        context.stroke();
        context.globalAlpha = 1;
        context.fillText(size(bytes), box.x - 6, at);
    }
    context.textAlign = "center";
    const across = ticks(Math.max(0, x.from), x.to, box.w / 110, false);
    for (const value of across.all) {
        const at = box.x + (box.w * (value - x.from)) / (x.to - x.from);
        context.fillRect(Math.round(at), box.y + box.h, 1, 5);
        if (plot.byTime || Number.isInteger(value)) context.fillText(plot.byTime ? timeTick(value, across.step) : count(value), at, box.y + box.h + 13);
    }
    context.strokeRect(box.x - 0.5, box.y - 0.5, box.w + 1, box.h + 1);
    context.save();
    context.beginPath();
    context.rect(box.x, 0, box.w, height);
    context.clip();
    context.textAlign = "left";
    for (const span of plot.spans) {
        if (span.depth >= plot.rows || span.to < x.from || span.from > x.to) continue;
        const from = Math.max(box.x, box.x + (box.w * (span.from - x.from)) / (x.to - x.from));
        const to = Math.min(box.x + box.w, box.x + (box.w * (span.to - x.from)) / (x.to - x.from));
        const top = box.y + box.h + MARGIN.axis + span.depth * MARGIN.span;
        context.fillStyle = css(page.colours.names[hash(span.name)]);
        context.fillRect(from, top, Math.max(1, to - from - 0.5), MARGIN.span - 2);
        if (to - from > 30) label(context, span.name, from + 4, top + MARGIN.span / 2 - 0.5, to - from - 8, page.colours.dark ? "#0c1016" : "#101820");
    }
    context.restore();
    context.fillStyle = text;
}

/** Cuts a text to a width. */
function label(context, text, x, y, width, colour) {
    context.fillStyle = colour;
    const fits = Math.floor(width / 6);
    if (fits >= 2) context.fillText(text.length > fits ? `${text.slice(0, fits - 1)}…` : text, x, y, width);
}

// ---- overlays: the selected state, the peak, the hovered and the pinned band ----------------------------------------------------

const overlayCanvas = new Canvas($("overlay"), (context) => {
    const d = page.device;
    if (!d || plot.wide === 0) return;
    const box = plot.box();
    const at = (state) => box.x + (box.w * (plot.place(state) - plot.x.from)) / (plot.x.to - plot.x.from);
    const vertical = (x, colour, dash) => {
        if (x < box.x - 1 || x > box.x + box.w + 1) return;
        context.strokeStyle = colour;
        context.setLineDash(dash);
        context.lineWidth = 1;
        context.beginPath();
        context.moveTo(Math.round(x) + 0.5, box.y);
        context.lineTo(Math.round(x) + 0.5, box.y + box.h);
        context.stroke();
        context.setLineDash([]);
    };
    for (const event of d.outOfMemory) vertical(at(event + 1), "#e03131", [2, 2]);
    vertical(at(page.moment), page.colours.accent, []);
    if (typeof plot.cursor === "number") vertical(plot.cursor, page.colours.faint, [3, 3]);
    const peak = at(d.peak);
    if (peak >= box.x && peak <= box.x + box.w) {
        context.fillStyle = page.colours.accent;
        context.beginPath();
        context.moveTo(peak, box.y + 1);
        context.lineTo(peak - 5, box.y - 8);
        context.lineTo(peak + 5, box.y - 8);
        context.fill();
    }
    if (page.hovered >= 0 && page.hovered !== page.pinned) outline(context, box, page.hovered, page.colours.text, 1);
    if (page.pinned >= 0) outline(context, box, page.pinned, page.colours.accent, 2);
});

/** Draws the outline of a band. */
function outline(context, box, block, colour, thick) {
    const { ids, wide, high } = plot;
    const ratio = timelineCanvas.ratio;
    const id = block + 1;
    context.fillStyle = colour;
    for (let column = 0; column < wide; column++) {
        let [low, top] = [-1, -1];
        for (let row = 0, at = column; row < high; row++, at += wide) {
            if (ids[at] !== id) continue;
            if (top < 0) top = row;
            low = row;
        }
        if (top < 0) continue;
        const [left, begins] = [box.x + column / ratio, column === 0 || !edgeless(column - 1, top, low, id)];
        const ends = column === wide - 1 || !edgeless(column + 1, top, low, id);
        if (begins || ends) context.fillRect(left, box.y + top / ratio, 1 / ratio + thick - 1, (low - top + 1) / ratio);
        context.fillRect(left, box.y + top / ratio, 1 / ratio, thick);
        context.fillRect(left, box.y + (low + 1) / ratio - thick, 1 / ratio, thick);
    }
}

/** Returns whether a band continues in another column, possibly at another height. */
function edgeless(column, top, low, id) {
    const { ids, wide, high } = plot;
    for (let row = Math.max(0, top - 2); row <= Math.min(high - 1, low + 2); row++) if (ids[row * wide + column] === id) return true;
    return false;
}

// ---- segments ---------------------------------------------------------------------------------------------------------

const BAR = { high: 20, gap: 7, least: 26, most: 3000 };
const bars = { segments: [], parts: [] };

const segmentsCanvas = new Canvas($("segments"), (context, width) => {
    const { device: d, moment } = page;
    if (!d) return;
    const segments = d.segments(moment);
    const live = d.live(moment).sort((a, b) => d.addr[a] - d.addr[b]);
    const drawn = segments.length <= BAR.most ? segments : new Set([...segments].sort((a, b) => b.size - a.size).slice(0, BAR.most));
    const largest = segments.reduce((most, s) => Math.max(most, s.size), 1);
    Object.assign(bars, { segments: [], parts: [] });
    let [x, y] = [0, 2];
    for (const segment of segments) {
        if (drawn !== segments && !drawn.has(segment)) continue;
        const w = Math.max(BAR.least, (width - 2) * (segment.size / largest));
        if (x > 0 && x + w > width) [x, y] = [0, y + BAR.high + BAR.gap];
        bars.segments.push({ ...segment, x: x + 1, y, w });
        x += w + BAR.gap;
    }
    const wanted = `${y + BAR.high + 4}px`;
    if (segmentsCanvas.canvas.style.height !== wanted) {
        segmentsCanvas.canvas.style.height = wanted;
        return segmentsCanvas.redraw();
    }
    drawSegments(context, live);
    const title = $("moment");
    const used = live.reduce((sum, b) => sum + d.size[b], 0);
    title.replaceChildren(`Segments at ${moment === 0 ? "the beginning" : d.moment(moment - 1)} `);
    const held = d.mostReserved === 0 ? "the file has no segments" : `${size(d.reserved[moment])} in ${number(segments.length, "segments")}${drawn === segments ? "" : ` (the ${count(BAR.most)} largest)`}`;
    title.append(element("span", {}, `${held}; ${size(used)} in use by ${number(live.length, "allocations")}`));
});

function drawSegments(context, live) {
    const d = page.device;
    const { colours, marked } = page;
    let next = 0;
    for (const segment of bars.segments) {
        context.fillStyle = css(colours.plot);
        context.fillRect(segment.x, segment.y, segment.w, BAR.high);
        const end = segment.addr + segment.size;
        next = search(0, live.length, (i) => d.addr[live[i]] >= segment.addr);
        for (; next < live.length && d.addr[live[next]] < end; next++) {
            const block = live[next];
            const from = segment.x + (segment.w * (d.addr[block] - segment.addr)) / segment.size;
            const w = Math.max(1, (segment.w * d.size[block]) / segment.size);
            const colour = css(colours.names[d.colour[block]]);
            bars.parts.push({ block, x: from, y: segment.y, w });
            context.globalAlpha = marked && !marked[block] ? 0.18 : 1;
            context.fillStyle = colour;
            if (d.requested[block] < page.moment) {
                for (let stripe = 0; stripe < w; stripe += 4) context.fillRect(from + stripe, segment.y, Math.min(2, w - stripe), BAR.high);
            } else {
                context.fillRect(from, segment.y, w > 3 ? w - 0.5 : w, BAR.high);
            }
            context.globalAlpha = 1;
            if (block === page.pinned) {
                context.strokeStyle = colours.accent;
                context.lineWidth = 2;
                context.strokeRect(from, segment.y, w, BAR.high);
            }
        }
        context.lineWidth = 1;
        context.strokeStyle = colours.faint;
        context.strokeRect(Math.round(segment.x) - 0.5, segment.y - 0.5, Math.round(segment.w) + 1, BAR.high + 1);
    }
}

function startSegments() {
    const canvas = $("segments");
    const inside = (all, event) => all.findLast(({ x, y, w }) => event.offsetX >= x && event.offsetX < x + w && event.offsetY >= y && event.offsetY < y + BAR.high);
    canvas.addEventListener("pointermove", (event) => {
        const [part, segment] = [inside(bars.parts, event), inside(bars.segments, event)];
        page.hovered = part ? part.block : -1;
        overlayCanvas.redraw();
        if (part) tooltip.show(event.clientX, event.clientY, ...describe(part.block, 14));
        else if (segment) tooltip.show(event.clientX, event.clientY, terms([["segment", size(segment.size)], ["address", `0x${segment.addr.toString(16)}`], ["stream", String(segment.stream)], ["pages", segment.pages ? "grows in place" : null]]));
        else tooltip.hide();
    });
    canvas.addEventListener("pointerleave", () => {
        tooltip.hide();
        plot.left();
    });
    canvas.addEventListener("click", (event) => {
        const part = inside(bars.parts, event);
        pin(part ? part.block : -1);
    });
}

start().catch(failed);
