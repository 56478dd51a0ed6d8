// The page of a memory snapshot. State n is the state after n events; state 0 is before the first event.

/** A tree of partial sums with 32 children per node: logarithmic time for updates and for searches by the running sum. */
class Sums {
    constructor(length) {
        this.levels = [];
        for (let n = Math.max(1, length); ; n = Math.ceil(n / 32)) {
            this.levels.push(new Float64Array(n));
            if (n === 1) break;
        }
        this.below = 0;
    }

    clear() {
        for (const level of this.levels) level.fill(0);
    }

    add(index, value) {
        for (const level of this.levels) {
            level[index] += value;
            index >>>= 5;
        }
    }

    /** Returns the index whose part of the sum contains `at`, -1 past the end; `below` is the sum before that part. */
    find(at) {
        const { levels } = this;
        let index = 0;
        let below = 0;
        if (!(at < levels[levels.length - 1][0])) return -1;
        for (let depth = levels.length - 2; depth >= 0; depth--) {
            const level = levels[depth];
            index *= 32;
            const last = Math.min(index + 31, level.length - 1);
            while (index < last && below + level[index] <= at) below += level[index++];
        }
        this.below = below;
        return index;
    }
}

/** A device's columns and derived data. */
class Device {
    constructor(data, about) {
        const column = (name) => data.column(`d${about.device}.${name}`);
        Object.assign(this, {
            about,
            actions: column("event.action"),
            times: data.has(`d${about.device}.event.time`) ? column("event.time") : null,
            outOfMemory: column("oom.event"),
            addr: column("block.addr"),
            size: column("block.size"),
            stream: column("block.stream"),
            start: column("block.start"),
            requested: column("block.requested"),
            done: column("block.done"),
            site: column("block.site"),
            freed: column("block.freed"),
            extents: Object.fromEntries(["addr", "size", "stream", "start", "end", "pages"].map((n) => [n, column(`extent.${n}`)])),
        });
        this.events = this.actions.length;
        this.blocks = this.addr.length;
        // Blocks of one site share a colour; each block of unknown site has its own colour.
        this.colour = Uint8Array.from(this.site, (site, block) => (page.sites.known(site) ? site : block) % COLOURS);
        this.total();
    }

    /** Computes the bytes in use and reserved in each state, and the block that each event begins (index + 1) or ends (negative). */
    total() {
        const { events, start, done, size, extents } = this;
        this.used = new Float64Array(events + 1);
        this.reserved = new Float64Array(events + 1);
        this.change = new Int32Array(events);
        for (let b = 0; b < this.blocks; b++) {
            this.used[start[b] + 1] += size[b];
            if (start[b] >= 0) this.change[start[b]] = b + 1;
            if (done[b] < events) {
                this.used[done[b] + 1] -= size[b];
                this.change[done[b]] = -b - 1;
            }
        }
        for (let e = 0; e < extents.addr.length; e++) {
            this.reserved[extents.start[e] + 1] += extents.size[e];
            if (extents.end[e] < events) this.reserved[extents.end[e] + 1] -= extents.size[e];
        }
        this.peak = 0;
        for (let s = 1; s <= events; s++) {
            this.used[s] += this.used[s - 1];
            this.reserved[s] += this.reserved[s - 1];
            if (this.used[s] > this.used[this.peak]) this.peak = s;
        }
        this.mostReserved = this.reserved.reduce((most, bytes) => Math.max(most, bytes), 0);
    }

    lives(block, state) {
        return this.start[block] < state && this.done[block] >= state;
    }

    /** Returns the blocks that are live in a state, in the order of allocation. */
    live(state) {
        const all = [];
        for (let b = 0; b < this.blocks; b++) if (this.lives(b, state)) all.push(b);
        return all;
    }

    /** Returns the segments in a state by address; adjacent pages of one stream form one segment. */
    segments(state) {
        const { addr, size, stream, start, end, pages } = this.extents;
        const all = [];
        for (let e = 0; e < addr.length; e++) if (start[e] < state && end[e] >= state) all.push(e);
        all.sort((a, b) => addr[a] - addr[b]);
        const joined = [];
        for (const e of all) {
            const before = joined[joined.length - 1];
            if (before && before.pages && pages[e] && before.addr + before.size === addr[e] && before.stream === stream[e]) before.size += size[e];
            else joined.push({ addr: addr[e], size: size[e], stream: stream[e], pages: pages[e] });
        }
        return joined;
    }

    /** Formats the time of an event. */
    moment(event) {
        if (event < 0) return "before the first event";
        if (event >= this.events) return "never";
        const name = `event ${count(event)}`;
        return this.times ? `${time(this.times[event])}  (${name})` : name;
    }

    /** Formats the lifetime of a block. */
    lifetime(block) {
        const [from, to] = [this.start[block], this.done[block]];
        if (from < 0 || to >= this.events) return null;
        const events = number(to - from, "events");
        return this.times ? `${time(this.times[to] - this.times[from])}  (${events})` : events;
    }
}

/** The sites of allocations: contexts and stacks by number. */
class Sites {
    constructor(data) {
        const column = data.column;
        this.texts = data.meta.texts;
        [this.context, this.end, this.stack] = [column("site.context"), column("site.end"), column("site.frames")];
        [this.name, this.file, this.line] = [column("frame.name"), column("frame.file"), column("frame.line")];
    }

    annotation(site) {
        return this.texts[this.context[site]];
    }

    known(site) {
        return this.frames(site).length > 0 || this.annotation(site) !== "";
    }

    frames(site) {
        return this.stack.subarray(site === 0 ? 0 : this.end[site - 1], this.end[site]);
    }

    place(frame) {
        const file = this.texts[this.file[frame]];
        return file && (this.line[frame] ? `${file}:${this.line[frame]}` : file);
    }

    frameText(frame) {
        const place = this.place(frame);
        return place ? `${this.texts[this.name[frame]]}  ${place.split("/").pop()}` : this.texts[this.name[frame]];
    }

    /** Returns the name of a site in lists: its innermost frame. */
    label(site) {
        const [innermost] = this.frames(site);
        return innermost === undefined ? this.annotation(site) || "no stack" : this.frameText(innermost);
    }

    /** Returns a flag for each site: 1 if it contains the text, which is in lower case. */
    matching(text) {
        const frames = Array.from(this.name, (name, f) => `${this.texts[name]} ${this.place(f)}`.toLowerCase().includes(text));
        return Uint8Array.from(this.context, (context, site) => (this.texts[context].toLowerCase().includes(text) || this.frames(site).some((f) => frames[f]) ? 1 : 0));
    }

    /** Creates a list of at most `most` frames of the stack. */
    stackList(site, most) {
        const frames = this.frames(site);
        const list = element("ol", { className: "stack" });
        for (const f of frames.subarray(0, most)) list.append(element("li", {}, this.texts[this.name[f]], " ", element("span", {}, this.place(f))));
        if (frames.length > most) list.append(element("li", {}, element("span", {}, `and ${frames.length - most} more: click`)));
        return list;
    }
}

// ---- the page ---------------------------------------------------------------------------------------------------------

const page = { data: null, sites: null, device: null, colours: theme(), pinned: -1, hovered: -1, moment: 0, marked: null };

/** Describes a block, with at most `most` frames of its stack. */
function describe(block, most) {
    const { device: d, sites } = page;
    const site = d.site[block];
    const freed = d.freed[block];
    const requested = d.requested[block];
    const parts = [
        terms([
            ["size", `${size(d.size[block])}  (${count(d.size[block])} bytes)`],
            ["address", `0x${d.addr[block].toString(16)}`],
            ["allocated", d.moment(d.start[block])],
            ["freed", d.moment(requested)],
            ["free", requested < d.done[block] - 1 ? d.moment(d.done[block]) : null],
            ["lived", d.lifetime(block)],
            ["stream", String(d.stream[block])],
            ["annotation", sites.annotation(site)],
        ]),
        sites.stackList(site, most),
    ];
    if (most > 99 && sites.frames(freed).length > 0) parts.push(element("h2", {}, "freed at"), sites.stackList(freed, most));
    return parts;
}

function pin(block) {
    page.pinned = block;
    $("allocation").replaceChildren(...(block < 0 ? [element("p", { className: "hint" }, "Nothing is selected.")] : describe(block, 1000)));
    if (block >= 0) showTab("allocation");
    segmentsCanvas.redraw();
    overlayCanvas.redraw();
}

/** Highlights and lists blocks; `null` for none. */
function mark(marked, title) {
    const d = page.device;
    page.marked = marked;
    const found = [];
    let bytes = 0;
    if (marked) {
        for (let b = 0; b < d.blocks; b++) {
            if (!marked[b]) continue;
            found.push(b);
            bytes += d.size[b];
        }
    }
    found.sort((a, b) => d.size[b] - d.size[a] || a - b);
    $("found").textContent = marked ? `${number(found.length, "allocations")}, ${size(bytes)}` : "";
    const list = element("ul", { className: "rows" });
    fillList(list, found, (block) => {
        const when = `${d.start[block] < 0 ? "before" : d.times ? time(d.times[d.start[block]]) : count(d.start[block])}`;
        const row = element("button", { type: "button" }, element("b", {}, size(d.size[block])), element("span", {}, page.sites.label(d.site[block])), element("i", {}, when));
        row.onclick = () => {
            pin(block);
            visit(block);
        };
        return row;
    });
    const hint = marked ? `${title}: ${number(found.length, "allocations")}, ${size(bytes)}` : "What a search finds is listed here, the largest first.";
    $("matches").replaceChildren(element("p", { className: "hint" }, hint), list);
    timelineCanvas.redraw();
    segmentsCanvas.redraw();
}

/** Scrolls to the lifetime of a block and selects the state after its allocation. */
function visit(block) {
    const d = page.device;
    const [from, to] = [plot.place(d.start[block] + 1), plot.place(d.done[block] + 1)];
    if (to < plot.x.from || from > plot.x.to) plot.x.show(from - (plot.x.to - plot.x.from) / 3, from + (plot.x.to - plot.x.from) / 1.5);
    choose(d.start[block] + 1);
    timelineCanvas.redraw();
}

function choose(state) {
    page.moment = Math.max(0, Math.min(page.device.events, state));
    segmentsCanvas.redraw();
    overlayCanvas.redraw();
}

/** Moves to the previous or next block among those that are live in the selected state. */
function step(by) {
    const live = page.device.live(page.moment);
    if (live.length === 0) return;
    const at = live.indexOf(page.pinned);
    pin(live[at < 0 ? (by > 0 ? 0 : live.length - 1) : Math.max(0, Math.min(live.length - 1, at + by))]);
}

/** Lists memory that is still allocated at the end, by innermost frame. */
function fillLeft() {
    const { device: d, sites } = page;
    const groups = new Map();
    let bytes = 0;
    let blocks = 0;
    for (let b = 0; b < d.blocks; b++) {
        if (d.requested[b] < d.events || d.done[b] < d.events) continue;
        const label = sites.label(d.site[b]);
        const group = groups.get(label) || { label, bytes: 0, blocks: [] };
        groups.set(label, group);
        group.bytes += d.size[b];
        group.blocks.push(b);
        bytes += d.size[b];
        blocks++;
    }
    const rows = [...groups.values()].sort((a, b) => b.bytes - a.bytes);
    const list = element("ul", { className: "rows" });
    fillList(list, rows, (group) => {
        const row = element("button", { type: "button" }, element("b", {}, size(group.bytes)), element("span", { title: group.label }, group.label), element("i", {}, `× ${count(group.blocks.length)}`));
        row.onclick = () => {
            const marked = new Uint8Array(d.blocks);
            for (const b of group.blocks) marked[b] = 1;
            mark(marked, `still allocated, ${group.label}`);
            showTab("matches");
        };
        return row;
    });
    $("left").replaceChildren(element("p", { className: "hint" }, `${size(bytes)} in ${number(blocks, "allocations")} at the end, by innermost frame`), list);
    return { bytes, blocks };
}

function open(which) {
    const about = page.data.meta.devices[which];
    const d = (page.device = new Device(page.data, about));
    Object.assign(page, { pinned: -1, hovered: -1, marked: null, moment: d.peak });
    $("axis").disabled = !d.times;
    if (!d.times) $("axis").value = "event";
    plot.open(d);
    const left = fillLeft();
    const bold = (text) => element("b", {}, text);
    const said = ["peak ", bold(size(d.used[d.peak])), ` in use at ${d.moment(d.peak - 1)}`];
    if (d.mostReserved > 0) said.push(" · at most ", bold(size(d.mostReserved)), " reserved");
    if (left.blocks > 0) said.push(" · ", bold(size(left.bytes)), ` in ${number(left.blocks, "allocations")} left at the end`);
    else said.push(" · nothing left at the end");
    said.push(` · ${number(d.events, "events")}`);
    if (d.outOfMemory.length > 0) said.push(" · ", bold(`${count(d.outOfMemory.length)} × out of memory`));
    if (about.lost > 0) said.push(` · ${number(about.lost, "earlier events")} lost`);
    $("summary").replaceChildren(...said);
    pin(-1);
    mark(null);
    showTab(left.blocks > 0 ? "left" : "allocation");
    timelineCanvas.redraw();
}

async function start() {
    page.data = await load();
    page.sites = new Sites(page.data);
    document.title = `${page.data.meta.name} · memory`;
    $("name").textContent = page.data.meta.name;
    page.data.meta.devices.forEach(({ device }, number) => $("device").append(element("option", { value: number }, String(device))));
    $("device").parentElement.hidden = page.data.meta.devices.length < 2;
    $("device").onchange = () => open(Number($("device").value));
    $("axis").onchange = () => {
        plot.open(page.device);
        timelineCanvas.redraw();
    };
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (page.colours = theme()));
    startTabs();
    startKeys(() => pin(-1));
    startSearch((text) => {
        const sites = text && page.sites.matching(text);
        mark(text ? Uint8Array.from(page.device.site, (site) => sites[site]) : null, `“${text}”`);
        if (text) showTab("matches");
    });
    control($("timeline"), plot);
    startSegments();
    open(0);
    timelineCanvas.now();
    drawn();
}
