/** A layout of axes as controls: sizes, order, views. */
import { int } from "../formula/axes";
import type { App } from "./app";
import { h } from "./dom";
import { fresh, moved, narrowed, resized, specOf, widened, withExperts, type AxesForm, type AxesLayout } from "./form";
import { sizeRow, small } from "./rows";

export function axesFields(app: App, form: AxesForm): Node[] {
  const edit = (next: AxesForm): void => app.set({ spec: specOf(next) });
  const layouts = form.layouts.map((layout) => axesField(form, layout, edit));
  const open = form.layouts.some((layout) => layout.axes.some((axis) => axis.size === "*"));
  const world = sizeRow("world", app.state.world === null ? "" : `${app.state.world}`, (size) =>
    app.set({ world: int(size) ?? null }),
  );
  const experts = h(
    "button",
    {
      type: "button",
      class: "quiet",
      "data-key": "experts",
      onclick: () => edit(withExperts(form)),
    },
    "Add a view for experts",
  );
  return [
    ...layouts,
    ...(open || app.state.world !== null ? [world] : []),
    ...(form.layouts.length < 2 ? [experts] : []),
  ];
}

function axesField(form: AxesForm, { view, axes }: AxesLayout, edit: (form: AxesForm) => void): HTMLElement {
  const title = view === null ? "Mesh, adjacent ranks first" : `View ${view}`;
  const rows = axes.map((axis, place) =>
    sizeRow(
      axis.name,
      axis.size,
      (size) => edit(resized(form, view, axis.name, size)),
      view === null ? axis.name : `${axis.name} in ${view}`,
      "",
      h(
        "span",
        { class: "moves" },
        small("↑", `${axis.name} earlier`, view, place > 0, () => edit(moved(form, view, place, place - 1))),
        small("↓", `${axis.name} later`, view, place < axes.length - 1, () =>
          edit(moved(form, view, place, place + 1)),
        ),
        small("×", `remove ${axis.name}`, view, axes.length > 1, () => edit(narrowed(form, view, axis.name))),
      ),
    ),
  );
  return h(
    "fieldset",
    {},
    h("legend", {}, title),
    ...rows,
    adder(
      form,
      view,
      axes.map((axis) => axis.name),
      edit,
    ),
  );
}

function adder(
  form: AxesForm,
  view: string | null,
  taken: readonly string[],
  edit: (form: AxesForm) => void,
): HTMLElement {
  const input = h("input", {
    type: "text",
    placeholder: "axis",
    "aria-label": `name of an axis to add${view ? ` to ${view}` : ""}`,
    "data-key": `new ${view ?? ""}`,
    autocomplete: "off",
  });
  const add = (event: Event): void => {
    event.preventDefault();
    if (fresh(input.value.trim(), taken)) edit(widened(form, view, input.value.trim()));
  };
  return h("form", { class: "row add", onsubmit: add }, input, h("button", { class: "quiet" }, "Add axis"));
}
