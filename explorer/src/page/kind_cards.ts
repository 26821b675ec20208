/** All kinds of group, and the chosen one: what it shares, what it crosses, what was measured. */
import { useText } from "../formula/communicators";
import { pickText } from "../formula/plan";
import { coalesced, patternText } from "../formula/strided";
import type { App } from "./app";
import { badge, card, shortened, swatch } from "./card";
import { kindColour } from "./colours";
import { h, number, plural } from "./dom";
import { speedsOf, speedText } from "./scene";

export function kindsCard(app: App): HTMLElement {
  const { model } = app;
  const heads = ["kind", "groups", "size", ...(model.cluster ? ["within"] : [])];
  const rows = model.plan.specs.map(({ name }) => {
    const groups = model.plan.groups(name);
    const place = app.kinds.indexOf(name);
    const choose = (): void => app.set({ kind: name });
    const chosen = name === app.kind;
    const level = model.levelOf(name);
    return h(
      "tr",
      { class: chosen ? "chosen" : null },
      h(
        "th",
        { scope: "row" },
        h(
          "button",
          {
            type: "button",
            class: "kind",
            "aria-pressed": chosen ? "true" : "false",
            "data-key": `kind ${name}`,
            onclick: choose,
          },
          swatch(place < 0 ? "transparent" : kindColour(app.colours, place)),
          name,
        ),
      ),
      h("td", { class: "number" }, number(groups.count)),
      h("td", { class: "number" }, number(groups.size)),
      model.cluster
        ? h("td", {}, groups.size > 1 ? badge(level!, model.cluster.levels.indexOf(level!)) : "one rank")
        : null,
    );
  });
  return card(
    "Kinds of group",
    h(
      "table",
      { class: "kinds" },
      h("caption", { class: "unseen" }, "Kinds of group; choose one to colour its groups"),
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          ...heads.map((head, place) =>
            h(
              "th",
              {
                scope: "col",
                class: place === 1 || place === 2 ? "number" : null,
              },
              head,
            ),
          ),
        ),
      ),
      h("tbody", {}, ...rows),
    ),
  );
}

export function kindCard(app: App): HTMLElement {
  const { model, kind } = app;
  const each = model.plan.spec(kind);
  const groups = model.plan.groups(kind);
  const use = model.communicators.kinds.get(kind)!;
  const part = [
    each.levels ? `level ${each.level} of ${each.levels.join("x")}` : "",
    each.pick ? pickText(each.pick) : "",
  ]
    .filter(Boolean)
    .join(", ");
  const shares = model.plan.sharing.find((names) => names.includes(kind))!.filter((name) => name !== kind);
  const facts: [string, string][] = [
    ["axes", each.axes.join("-") + (each.view ? ` of view ${each.view}` : "")],
    ...(part ? [["part", part] as [string, string]] : []),
    ["groups", `${number(groups.count)} of ${plural(groups.size, "rank")}`],
    ["members", `${patternText(coalesced(groups.members))} (sizes x strides)`],
    ["communicator", useText(use)],
    ...(shares.length ? [["the same groups", shares.join(", ")] as [string, string]] : []),
    ...Object.entries(each.options ?? {}).map(([name, value]): [string, string] => [name, JSON.stringify(value)]),
  ];
  return card(
    `Kind ${kind}`,
    h("dl", {}, ...facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    reach(app, kind),
    measured(app, kind),
  );
}

/** How many groups end at each level, as a bar and in words. */
function reach(app: App, kind: string): HTMLElement | null {
  const found = app.model.crossings(kind);
  if (!found || app.model.plan.groups(kind).size === 1) return null;
  const { levels } = app.model.cluster!;
  const parts = found.reach.map((count, level) => ({ count, level })).filter(({ count }) => count);
  const bar = h(
    "div",
    { class: "reach", "aria-hidden": "true" },
    ...parts.map(({ count, level }) =>
      h("span", {
        class: `level${Math.min(level, 3)}`,
        style: `flex-grow:${count}`,
      }),
    ),
  );
  const text = parts.map(({ count, level }) => `${number(count)} within one ${levels[level]}`).join(", ");
  const hops = found.hops
    ? ` A ring takes up to ${found.hops} hops between hosts, on ${plural(found.nodes, "host")}.`
    : "";
  return h("div", {}, bar, h("p", {}, `${text}.${hops}`));
}

function measured(app: App, kind: string): HTMLElement | null {
  const found = app.given.measured;
  const rows = found?.kinds.filter((row) => row.name === kind) ?? [];
  if (!found || !rows.length) return null;
  const speeds = speedsOf(found, kind, app.model.plan.groups(kind).count).filter((speed) => speed !== null);
  const slow = found.slow_hosts.length ? ` Slow hosts: ${found.slow_hosts.join(", ")}.` : "";
  return h(
    "div",
    {},
    h("h3", {}, "Measured"),
    h(
      "p",
      {},
      `${speedText(Math.min(...speeds))} to ${speedText(Math.max(...speeds))} of bus bandwidth, all groups at once (${found.backend}).${slow}`,
    ),
    h(
      "ul",
      {},
      ...rows.map((row) =>
        h(
          "li",
          {},
          `${row.collective} of ${number(row.bytes)} bytes: ${speedText(row.busbw)}, slowest [${shortened(row.slowest.ranks, row.slowest.ranks.length)}] on ${row.slowest.hosts.slice(0, 3).join(", ")}`,
        ),
      ),
    ),
  );
}
