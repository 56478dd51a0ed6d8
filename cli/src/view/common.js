// Shared code of both pages: the data, formatted numbers, elements, colours, and a canvas that can be zoomed and dragged.

/** Loads the file's metadata and its columns: `column(name)` returns a typed array. */
async function load() {
    const text = atob(document.getElementById("data").textContent);
    const packed = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
    const bytes = await new Response(stream).arrayBuffer();
    const length = new Uint32Array(bytes, 0, 1)[0];
    const meta = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 4, length)));
    const kinds = { u8: Uint8Array, u32: Uint32Array, i32: Int32Array, f64: Float64Array };
    const column = (name) => {
        const [kind, from, count] = meta.columns[name];
        return new kinds[kind](bytes, 4 + length + from, count);
    };
    return { meta, column, has: (name) => name in meta.columns };
}

// ---- numbers ----------------------------------------------------------------------------------------------------------

const count = (n) => n.toLocaleString("en");

/** Formats a count; `things` is the plural noun. */
const number = (n, things) => `${count(n)} ${n === 1 ? things.replace(/s$/, "") : things}`;

/** Formats a number with a binary (1024) unit. */
function size(bytes) {
    if (Math.abs(bytes) < 1024) return `${count(bytes)} B`;
    const units = ["KiB", "MiB", "GiB", "TiB"];
    let unit = -1;
    while (Math.abs(bytes) >= 1023.5 && unit < 3) [bytes, unit] = [bytes / 1024, unit + 1];
    return `${digits(bytes)} ${units[unit]}`;
}

/** Formats four significant digits. */
function digits(n) {
    const a = Math.abs(n);
    return a >= 1000 ? count(Math.round(n)) : n.toFixed(a >= 100 ? 1 : a >= 10 ? 2 : 3).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
}

/** Formats a time given in microseconds. */
function time(us) {
    const a = Math.abs(us);
    if (a < 1) return us === 0 ? "0 s" : `${digits(us * 1e3)} ns`;
    if (a < 1e3) return `${digits(us)} µs`;
    if (a < 1e6) return `${digits(us / 1e3)} ms`;
    return `${digits(us / 1e6)} s`;
}

/** Formats a time on an axis whose ticks are `step` apart, so that neighbouring labels differ. */
function timeTick(us, step) {
    const [unit, name] = step >= 1e5 ? [1e6, "s"] : step >= 100 ? [1e3, "ms"] : step >= 0.1 ? [1, "µs"] : [1e-3, "ns"];
    const decimals = Math.max(0, Math.ceil(-Math.log10(step / unit) - 1e-9));
    return `${(us / unit).toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals })} ${name}`;
}

/** Returns about `wanted` ticks between two values, at multiples of 1, 2 or 5 times a power of ten, or of a power of two. */
function ticks(from, to, wanted, binary) {
    const least = (to - from) / Math.max(1, wanted);
    let step;
    if (binary) {
        step = 2 ** Math.max(0, Math.ceil(Math.log2(least)));
    } else {
        const power = 10 ** Math.floor(Math.log10(least));
        step = power * [1, 2, 5, 10].find((m) => m * power >= least * (1 - 1e-9));
    }
    const all = [];
    for (let i = Math.ceil(from / step); i * step <= to; i++) all.push(i * step);
    return { step, all };
}

/** Returns the first index in `from`..`to` for which `test` holds; `test` must hold for all later indices. */
function search(from, to, test) {
    while (from < to) {
        const middle = (from + to) >>> 1;
        if (test(middle)) to = middle;
        else from = middle + 1;
    }
    return from;
}

// ---- elements ---------------------------------------------------------------------------------------------------------

const $ = (id) => document.getElementById(id);

/** Creates an element with properties (`data-` and `aria-` properties as attributes) and children. Text never becomes markup. */
function element(tag, properties, ...children) {
    const made = document.createElement(tag);
    for (const [key, value] of Object.entries(properties || {})) {
        if (key.includes("-")) made.setAttribute(key, value);
        else made[key] = value;
    }
    made.append(...children.filter((child) => child !== null && child !== undefined));
    return made;
}

/** Creates a list of terms and descriptions; terms without a description are left out. */
function terms(pairs) {
    const list = element("dl");
    for (const [term, said] of pairs) {
        if (said !== null && said !== undefined && said !== "") list.append(element("dt", {}, term), element("dd", {}, said));
    }
    return list;
}

/** Shows the first rows of a list that may be long, and more on request. */
function fillList(list, rows, make) {
    const more = (from) => {
        const to = Math.min(rows.length, from + 200);
        for (let i = from; i < to; i++) list.append(element("li", {}, make(rows[i])));
        if (to === rows.length) return;
        const button = element("button", { className: "more", type: "button" }, `${count(rows.length - to)} more`);
        button.onclick = () => {
            button.parentElement.remove();
            more(to);
        };
        list.append(element("li", {}, button));
    };
    list.replaceChildren();
    more(0);
}

/** Shows one panel of a group of tabs. */
function showTab(name) {
    for (const tab of document.querySelectorAll("[role=tab]")) {
        const shown = tab.id === `tab-${name}`;
        tab.setAttribute("aria-selected", shown);
        $(tab.getAttribute("aria-controls")).hidden = !shown;
    }
}

function startTabs() {
    for (const tab of document.querySelectorAll("[role=tab]")) tab.onclick = () => showTab(tab.id.slice(4));
}

const tooltip = {
    /** Shows these elements beside a point of the window. */
    show(x, y, ...children) {
        const box = $("tooltip");
        box.replaceChildren(...children);
        box.hidden = false;
        const { offsetWidth: w, offsetHeight: h } = box;
        box.style.left = `${x + 16 + w < innerWidth ? x + 16 : Math.max(4, x - w - 12)}px`;
        box.style.top = `${Math.max(4, Math.min(y + 16, innerHeight - h - 4))}px`;
    },
    hide() {
        $("tooltip").hidden = true;
    },
};

// ---- colours ----------------------------------------------------------------------------------------------------------

/** Returns the bytes of a colour given by OKLab lightness, chroma and a hue in degrees. */
function oklch(lightness, chroma, hue) {
    const [a, b] = [chroma * Math.cos((hue * Math.PI) / 180), chroma * Math.sin((hue * Math.PI) / 180)];
    const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
    const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
    const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
    const linear = [
        4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
        -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
        -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
    ];
    const gamma = (c) => (c <= 0.0031308 ? 12.92 * c : 1.055 * c ** (1 / 2.4) - 0.055);
    return linear.map((c) => Math.round(255 * gamma(Math.min(1, Math.max(0, c)))));
}

const css = ([r, g, b]) => `rgb(${r} ${g} ${b})`;

/** Returns a colour as a pixel of an image. */
const pixel = ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;

const mix = (from, to, part) => from.map((c, i) => Math.round(c + (to[i] - c) * part));

/** The number of colours that distinguish names. */
const COLOURS = 61;

/** Returns the page's colours in the reader's preferred scheme. */
function theme() {
    const style = getComputedStyle(document.documentElement);
    const of = (name) => style.getPropertyValue(name).trim();
    const rgb = (name) => of(name).match(/[0-9a-f]{2}/gi).map((h) => parseInt(h, 16));
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const names = [];
    for (let i = 0; i < COLOURS; i++) {
        const lightness = (dark ? 0.62 : 0.72) + 0.08 * ((i % 3) - 1);
        names.push(oklch(lightness, 0.12, (i * 137.508 + 250) % 360));
    }
    return { dark, names, text: of("--text"), faint: of("--faint"), line: of("--line"), accent: of("--accent"), plot: rgb("--plot") };
}

/** Returns the number of a text's colour, the same on every page. */
function hash(text) {
    let h = 2166136261;
    for (let i = 0; i < text.length; i++) h = Math.imul(h ^ text.charCodeAt(i), 16777619);
    return (h >>> 0) % COLOURS;
}

// ---- canvases ---------------------------------------------------------------------------------------------------------

/** A canvas that calls `draw(context, width, height)` when necessary, at most once a frame. Sizes are in CSS pixels. */
class Canvas {
    constructor(canvas, draw) {
        Object.assign(this, { canvas, draw, ratio: 1, width: 0, height: 0, due: false });
        new ResizeObserver(() => this.redraw()).observe(canvas);
        matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
    }

    redraw() {
        if (this.due) return;
        this.due = true;
        requestAnimationFrame(() => {
            this.due = false;
            this.now();
        });
    }

    now() {
        const { canvas } = this;
        this.ratio = devicePixelRatio || 1;
        [this.width, this.height] = [canvas.clientWidth, canvas.clientHeight];
        const [w, h] = [Math.round(this.width * this.ratio), Math.round(this.height * this.ratio)];
        if (w === 0 || h === 0) return;
        if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
        const context = canvas.getContext("2d");
        context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
        context.clearRect(0, 0, this.width, this.height);
        context.font = "12px system-ui, sans-serif";
        this.draw(context, this.width, this.height);
    }
}

/** The visible range of an axis: `from` to `to`, within `least` to `most`. */
class Range {
    constructor(least, most, closest) {
        this.limit(least, most, closest);
    }

    /** Sets the bounds. The visible length is at least `closest`; initially everything up to `home` is visible. */
    limit(least, most, closest, home = most) {
        Object.assign(this, { least, most: Math.max(most, least + closest), closest, home });
        this.reset();
    }

    reset() {
        [this.from, this.to] = [this.least, Math.min(this.most, Math.max(this.home, this.least + this.closest))];
    }

    show(from, to) {
        const whole = this.most - this.least;
        const span = Math.min(whole, Math.max(this.closest, to - from));
        this.from = Math.min(Math.max((from + to - span) / 2, this.least), this.most - span);
        this.to = this.from + span;
    }

    /** Multiplies the visible length by `factor`; the value `at` keeps its position. */
    zoom(factor, at) {
        const span = Math.min(this.most - this.least, Math.max(this.closest, (this.to - this.from) * factor));
        const part = (at - this.from) / (this.to - this.from);
        const from = Math.min(Math.max(at - part * span, this.least), this.most - span);
        [this.from, this.to] = [from, from + span];
    }

    /** Moves by a fraction of the visible length. */
    move(part) {
        const by = part * (this.to - this.from);
        const bounded = Math.min(Math.max(by, this.least - this.from), this.most - this.to);
        [this.from, this.to] = [this.from + bounded, this.to + bounded];
    }
}

/** Handles wheel, drag, clicks and keys of a plot that has an inner box and two ranges.
 *
 * `plot` has `box()` ({x, y, w, h} in the canvas), `x` (a Range), `y` (a Range whose values rise upwards, or null),
 * `changed()`, `hover(x, y, event)`, `left()` and `click(x, y)`. */
function control(canvas, plot) {
    let drag = null;
    const place = (event) => {
        const bounds = canvas.getBoundingClientRect();
        return [event.clientX - bounds.left, event.clientY - bounds.top];
    };
    const valueX = (x) => plot.x.from + ((x - plot.box().x) / plot.box().w) * (plot.x.to - plot.x.from);
    const valueY = (y) => plot.y.to - ((y - plot.box().y) / plot.box().h) * (plot.y.to - plot.y.from);
    canvas.addEventListener("wheel", (event) => {
        event.preventDefault();
        const [x, y] = place(event);
        const moved = (event.deltaY || event.deltaX) * (event.deltaMode === 1 ? 30 : 1);
        const factor = 1.0015 ** Math.max(-500, Math.min(500, moved));
        if (event.shiftKey && plot.wheelY) plot.wheelY(moved);
        else if (event.shiftKey && plot.y) plot.y.zoom(factor, valueY(y));
        else plot.x.zoom(factor, valueX(x));
        plot.changed();
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
        if (event.button !== 0) return;
        canvas.setPointerCapture(event.pointerId);
        drag = { at: place(event), moved: false };
    });
    canvas.addEventListener("pointermove", (event) => {
        const [x, y] = place(event);
        if (drag === null) return plot.hover(x, y, event);
        const [dx, dy] = [x - drag.at[0], y - drag.at[1]];
        if (!drag.moved && Math.hypot(dx, dy) < 4) return;
        Object.assign(drag, { at: [x, y], moved: true });
        tooltip.hide();
        plot.x.move(-dx / plot.box().w);
        if (plot.wheelY) plot.wheelY(-dy);
        else if (plot.y) plot.y.move(dy / plot.box().h);
        plot.changed();
    });
    canvas.addEventListener("pointerup", (event) => {
        const [was, [x, y]] = [drag, place(event)];
        drag = null;
        if (was && !was.moved) plot.click(x, y);
    });
    canvas.addEventListener("pointercancel", () => (drag = null));
    canvas.addEventListener("pointerleave", () => {
        tooltip.hide();
        plot.left();
    });
    canvas.addEventListener("dblclick", () => {
        plot.x.reset();
        if (plot.y) plot.y.reset();
        plot.changed();
    });
    canvas.addEventListener("keydown", (event) => {
        if (event.ctrlKey || event.metaKey || event.altKey) return;
        const middle = (plot.x.from + plot.x.to) / 2;
        const keys = {
            ArrowLeft: () => plot.x.move(-0.1),
            ArrowRight: () => plot.x.move(0.1),
            ArrowUp: () => (plot.wheelY ? plot.wheelY(-40) : plot.y && plot.y.move(0.1)),
            ArrowDown: () => (plot.wheelY ? plot.wheelY(40) : plot.y && plot.y.move(-0.1)),
            "+": () => plot.x.zoom(1 / 1.5, middle),
            "=": () => plot.x.zoom(1 / 1.5, middle),
            "-": () => plot.x.zoom(1.5, middle),
            "0": () => (plot.x.reset(), plot.y && plot.y.reset()),
            ...plot.keys,
        };
        if (!(event.key in keys)) return;
        event.preventDefault();
        keys[event.key]();
        plot.changed();
    });
}

/** Handles keys of the whole page: / focuses the search, Escape leaves it or calls `escape`. */
function startKeys(escape) {
    document.addEventListener("keydown", (event) => {
        const field = $("search");
        if (event.key === "/" && document.activeElement !== field) {
            event.preventDefault();
            field.focus();
            field.select();
        } else if (event.key === "Escape") {
            if (document.activeElement === field) field.blur();
            tooltip.hide();
            escape();
        }
    });
}

/** Calls `changed` with the text of the search field, shortly after the last key. */
function startSearch(changed) {
    let timer = 0;
    $("search").addEventListener("input", () => {
        clearTimeout(timer);
        timer = setTimeout(() => changed($("search").value.trim().toLowerCase()), 120);
    });
}

/** Records after how many milliseconds the page was drawn. */
function drawn() {
    requestAnimationFrame(() => (document.documentElement.dataset.drawn ??= performance.now()));
}

/** Shows an error on the page. */
function failed(error) {
    document.body.prepend(element("p", { className: "failed" }, `This page cannot be shown: ${error.message}`));
    throw error;
}
