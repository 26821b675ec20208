/** The right: a search, the rank that is pointed at, the pins, the comparison, and the kinds. */
import { difference } from "../formula/difference";
import type { App } from "./app";
import { card, shortened } from "./card";
import { h, number, plural } from "./dom";
import { hangs } from "./given";
import { kindCard, kindsCard } from "./kind_cards";
import { rankCard } from "./rank_card";
import { searchBox } from "./search_box";
import { rankText } from "./legend";

export function inspector(app: App): Node[] {
  return [
    searchBox(app),
    ...hang(app),
    rankCard(app),
    ...pinCard(app),
    ...compareCard(app),
    kindsCard(app),
    kindCard(app),
  ];
}

const ranksOf = (ranks: readonly number[]): string => shortened(ranks, ranks.length);

function hang(app: App): HTMLElement[] {
  const found = app.given.hang;
  if (!found) return [];
  const slow = found.slow.length
    ? [card("What is slow", h("ul", {}, ...found.slow.slice(0, 8).map((one) => h("li", {}, one.sentence))))]
    : [];
  if (!hangs(app.given)) return slow;
  const causes = found.causes
    .slice(0, 8)
    .map((cause) =>
      h(
        "li",
        {},
        h("b", {}, cause.cause),
        ` ${cause.operation}, call ${cause.call} of ${cause.group}: ${plural(cause.ranks.length, "rank")} (${shortened(cause.ranks, cause.ranks.length)})`,
      ),
    );
  const turns = found.turns
    .slice(0, 6)
    .map((step) =>
      h(
        "li",
        {},
        `${step.call}: ${ranksOf(step.waiting)} ${step.missing.length ? `for ${ranksOf(step.missing)}` : "in it, as all members"}`,
      ),
    );
  return [
    card(
      "What hangs",
      h("p", {}, found.verdict),
      h("ul", {}, ...causes),
      turns.length ? h("h3", {}, "Who waits for whom") : null,
      h("ul", {}, ...turns),
    ),
    ...slow,
  ];
}

function pinCard(app: App): HTMLElement[] {
  const { pins, model } = app;
  if (!pins.length) return [];
  const clear = h(
    "button",
    {
      type: "button",
      class: "quiet",
      "data-key": "unpin",
      onclick: () => app.set({ pins: [] }),
    },
    "Unpin",
  );
  const lines = pins.map((rank, place) =>
    h("p", {}, h("span", { class: "pin" }, "AB"[place]), ` ${rankText(model, rank)}`),
  );
  if (pins.length < 2)
    return [card("Pinned", ...lines, h("p", { class: "note" }, "Pin a second rank to see what they share."), clear)];
  const [one, other] = pins;
  const shared = model.plan.specs.filter(({ name }) => {
    const groups = model.plan.groups(name);
    return groups.size > 1 && groups.has(one) && groups.has(other) && groups.indexOf(one) === groups.indexOf(other);
  });
  const level = model.cluster?.levelOf(one, other);
  const near =
    level === undefined
      ? null
      : h(
          "p",
          {},
          level
            ? `They are on two hosts; the innermost level that contains both is ${model.cluster!.levels[level]}.`
            : "They are on the same host.",
        );
  const text = shared.length
    ? `They share a group of ${shared.length} of the ${model.plan.specs.length} kinds: ${shared.map((each) => each.name).join(", ")}.`
    : "They share no group.";
  return [card("Pinned", ...lines, h("p", {}, text), near, clear)];
}

function compareCard(app: App): HTMLElement[] {
  if (!app.compared || !app.state.compare) return [];
  const found = difference(app.model.plan, app.compared.plan);
  const worlds = [app.model.plan.worldSize, app.compared.plan.worldSize];
  const rows = found.groups.map((kind) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, kind.name),
      h("td", { class: "number" }, number(kind.ranks)),
      h(
        "td",
        {},
        kind.leftSize === kind.rightSize
          ? number(kind.leftSize)
          : `${number(kind.leftSize)} → ${number(kind.rightSize)}`,
      ),
    ),
  );
  const list = (title: string, names: readonly string[]): HTMLElement | null =>
    names.length ? h("p", {}, h("b", {}, title), ` ${names.join(", ")}`) : null;
  const axes = found.axes.map(({ view, axis, left, right }) =>
    h("li", {}, `${view ? `${view}: ` : ""}${axis} ${left ?? "none"} → ${right ?? "none"}`),
  );
  return [
    card(
      "What changed",
      worlds[0] === worlds[1] ? null : h("p", {}, `${number(worlds[0])} → ${number(worlds[1])} ranks`),
      axes.length ? h("ul", {}, ...axes) : h("p", {}, "The axes are the same."),
      rows.length
        ? h(
            "table",
            {},
            h("caption", {}, "Kinds whose groups differ"),
            h(
              "thead",
              {},
              h(
                "tr",
                {},
                h("th", { scope: "col" }, "kind"),
                h("th", { scope: "col", class: "number" }, "ranks"),
                h("th", { scope: "col" }, "size"),
              ),
            ),
            h("tbody", {}, ...rows),
          )
        : null,
      list("only before:", found.onlyLeft),
      list("only after:", found.onlyRight),
      list("equal:", found.equal),
    ),
  ];
}
