/** The arguments of a recipe as controls. */
import { RECIPES } from "../formula/source";
import type { App } from "./app";
import { h } from "./dom";
import { shifted, specOf, type RecipeForm } from "./form";
import { checkRow, sizeRow, small, textRow } from "./rows";

// What is inferred again where one of the two is changed.
const INFERRED: Partial<Record<string, string[]>> = { world: ["dp", "dp_shard"], dp: ["world"], dp_shard: ["world"] };
// What most layouts set; the rest is folded away.
const FIRST = new Set("world tp cp dp pp ep etp order dp_shard dp_replicate sp dcp pcp attn_dp".split(" "));

export function recipeFields(app: App, form: RecipeForm): Node[] {
  const { parameters } = RECIPES[form.recipe];
  const edit = (name: string, value: string): void => {
    const anew = Object.fromEntries((INFERRED[name] ?? []).map((other) => [other, ""]));
    app.set({ spec: specOf({ ...form, values: { ...form.values, ...anew, [name]: value } }), world: null });
  };
  const rows = Object.entries(parameters).map(([name, kind]): [string, HTMLElement] => {
    const value = form.values[name] ?? "";
    if (name === "order") return [name, orderField(form, (order) => edit("order", order))];
    if (kind === "int") return [name, sizeRow(name, value, (size) => edit(name, size), name, inferred(app, name))];
    if (kind === "bool")
      return [
        name,
        checkRow(name, ["true", "yes", "1"].includes(value.toLowerCase()), (on) => edit(name, on ? "true" : "")),
      ];
    return [name, textRow(name, value, kind === "sizes" ? "2x4" : "", (text) => edit(name, text))];
  });
  const more = rows.filter(([name]) => !FIRST.has(name)).map(([, row]) => row);
  const open = Object.keys(form.values).some((name) => !FIRST.has(name) && form.values[name]);
  return [
    h(
      "fieldset",
      {},
      h("legend", {}, "Sizes; an empty one is inferred"),
      ...rows.filter(([name]) => FIRST.has(name) && name !== "order").map(([, row]) => row),
    ),
    ...rows.filter(([name]) => name === "order").map(([, row]) => row),
    ...(more.length ? [h("details", { open }, h("summary", { "data-key": "more" }, "More arguments"), ...more)] : []),
  ];
}

/** The size that an empty argument has: what was inferred, or 1. */
function inferred({ model }: App, name: string): string {
  const { mesh } = model.plan;
  if (name === "world") return `${model.plan.worldSize}`;
  const sizes = [mesh, ...mesh.views.values()].find((layout) => layout.sizes.has(name))?.sizes;
  return `${sizes?.get(name) ?? 1}`;
}

function orderField(form: RecipeForm, edit: (order: string) => void): HTMLElement {
  const order = (form.values.order || "tp-cp-ep-dp-pp").split("-");
  const rows = order.map((axis, place) =>
    h(
      "li",
      {},
      h("span", { class: "name" }, axis),
      small("↑", `${axis} earlier`, "order", place > 0, () => edit(shifted(order, place, place - 1).join("-"))),
      small("↓", `${axis} later`, "order", place < order.length - 1, () =>
        edit(shifted(order, place, place + 1).join("-")),
      ),
    ),
  );
  return h("fieldset", {}, h("legend", {}, "Order, adjacent ranks first"), h("ol", { class: "order" }, ...rows));
}
