// The table of average times by the name of the operation.

/** Categories of device events of claystone and of PyTorch's profiler. */
const DEVICE = new Set(["kernel", "copy", "fill", "read", "write", "gpu_memcpy", "gpu_memset"]);

const COLUMNS = [
    { key: "name", title: "name", show: (row) => row.name },
    { key: "device", title: "device", show: (row) => (row.deviceCalls ? time(row.device) : "") },
    { key: "share", title: "share", show: (row) => (row.deviceCalls ? `${(100 * row.share).toFixed(1)} %` : "") },
    { key: "average", title: "average", show: (row) => time(row.average) },
    { key: "calls", title: "calls", show: (row) => count(row.calls) },
    { key: "host", title: "host", show: (row) => (row.hostCalls ? time(row.host) : "") },
    { key: "own", title: "own", show: (row) => (row.hostCalls ? time(row.own) : "") },
    { key: "bytes", title: "bytes", show: (row) => (row.bytes ? size(row.bytes) : "") },
    { key: "rate", title: "GB/s", show: (row) => (row.rate ? digits(row.rate) : "") },
    { key: "copy", title: "of copy", show: (row) => (row.copy ? `${Math.round(100 * row.copy)} %` : "") },
    { key: "flops", title: "GFLOP/s", show: (row) => (row.flops ? digits(row.flops) : "") },
];

const table = { rows: [], sorted: "device", falling: true };

/** Sums all events in a row for each name. An operation on the CPU device counts for both device and host. */
function summarise(p) {
    const groups = new Map();
    const group = (name) => {
        if (!groups.has(name)) groups.set(name, { name, device: 0, deviceCalls: 0, host: 0, own: 0, hostCalls: 0, operations: 0, bytes: 0, work: 0 });
        return groups.get(name);
    };
    // There are few categories and templates, so the properties of events with them are computed once.
    const onDevice = p.texts.map((text) => DEVICE.has(text));
    const said = p.templates.map((_, template) => {
        const pairs = p.template(template);
        const text = (key) => pairs.find((pair) => pair[0] === key && pair.length > 1)?.[1];
        const slots = pairs.filter((pair) => pair.length === 1).map((pair) => pair[0]);
        return { operation: text("operation"), device: text("device"), bytes: slots.indexOf("bytes"), flops: slots.indexOf("flops") };
    });
    const operation = p.texts.indexOf("operation");
    const operations = new Set([operation, p.texts.indexOf("cpu_op")]);
    const copies = new Map((p.about?.devices || []).map((device) => [device.device, device.copy]));
    for (let e = 0; e < p.events; e++) {
        const about = said[p.templateOf[e]];
        const device = onDevice[p.category[e]];
        const row = group(device && about.operation ? about.operation : p.texts[p.name[e]]);
        const cpu = about.device === "cpu" && p.category[e] === operation;
        if (!device) {
            // A launch inside the operation of its name is counted as part of the operation.
            const outer = p.outer(e);
            if (outer < 0 || p.name[outer] !== p.name[e]) row.host += p.took[e];
            row.own += p.own[e];
            row.hostCalls++;
            if (operations.has(p.category[e])) row.operations++;
        }
        if (device || cpu) {
            row.device += cpu ? p.own[e] : p.took[e];
            row.deviceCalls++;
            row.copies = copies.get(about.device);
            if (about.bytes >= 0) row.bytes += p.numbers[p.argument[e] + about.bytes];
            if (about.flops >= 0) row.work += p.numbers[p.argument[e] + about.flops];
        }
    }
    const rows = [...groups.values()];
    const whole = rows.reduce((sum, row) => sum + row.device, 0);
    for (const row of rows) {
        row.calls = row.operations || row.deviceCalls || row.hostCalls;
        row.average = row.deviceCalls ? row.device / row.deviceCalls : row.host / row.hostCalls;
        row.share = whole > 0 ? row.device / whole : 0;
        row.rate = row.device > 0 ? row.bytes / row.device / 1e3 : 0;
        row.flops = row.device > 0 ? row.work / row.device / 1e3 : 0;
        row.copy = row.copies ? (row.rate * 1e9) / row.copies : 0;
    }
    return { rows, device: whole };
}

/** Fills the table; columns without data are left out. */
function fillTable() {
    const column = COLUMNS.find((c) => c.key === table.sorted);
    const { falling } = table;
    const value = (row) => row[column.key];
    const order = (a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0);
    const rows = [...table.rows].sort((a, b) => (falling ? order(b, a) : order(a, b)) || b.own - a.own);
    const shown = COLUMNS.filter((c) => c.key === "name" || table.rows.some((row) => row[c.key]));
    const head = element("tr");
    for (const c of shown) {
        const button = element("button", { type: "button" }, c.title);
        button.onclick = () => {
            table.falling = table.sorted === c.key ? !table.falling : c.key !== "name";
            table.sorted = c.key;
            fillTable();
        };
        head.append(element("th", { scope: "col", "aria-sort": c === column ? (falling ? "descending" : "ascending") : "none" }, button));
    }
    document.querySelector("#table thead").replaceChildren(head);
    const body = document.querySelector("#table tbody");
    body.replaceChildren();
    const more = (from) => {
        for (const row of rows.slice(from, from + 200)) {
            const line = element("tr", { title: row.name }, ...shown.map((c) => element("td", {}, c.show(row))));
            line.onclick = () => find(row.name);
            body.append(line);
        }
        if (rows.length <= from + 200) return;
        const button = element("button", { className: "more", type: "button" }, `${count(rows.length - from - 200)} more`);
        const line = element("tr", {}, element("td", { colSpan: shown.length }, button));
        button.onclick = () => {
            line.remove();
            more(from + 200);
        };
        body.append(line);
    };
    more(0);
}
