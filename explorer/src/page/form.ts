/**
 * A SPEC as a form: its sizes and their order, and the SPEC again after a change.
 *
 *     tp=2,dp=4/expert:ep=8      two layouts of axes          megatron:tp=2,pp=2      arguments of a recipe
 */
import { int, isIdentifier, partition } from "../formula/axes";
import { RECIPES, resolved } from "../formula/source";

export interface AxesLayout {
  /** Null for the mesh itself. */
  view: string | null;
  axes: { name: string; size: string }[];
}

export interface AxesForm {
  type: "axes";
  layouts: AxesLayout[];
}

export interface RecipeForm {
  type: "recipe";
  recipe: string;
  values: Record<string, string>;
}

export type Form = AxesForm | RecipeForm;

/** The form of a SPEC; null where it has none yet. */
export function formOf(text: string): Form | null {
  const spec = resolved(text);
  const [name, colon] = partition(spec, ":");
  if (colon && name in RECIPES)
    return {
      type: "recipe",
      recipe: name,
      values: valuesOf(spec.slice(name.length + 1)),
    };
  const [mesh, ...views] = spec.split("/");
  if (!mesh.includes("=")) return null;
  const layouts = [{ view: null, axes: axesOf(mesh) }, ...views.map(viewOf)];
  return { type: "axes", layouts };
}

const items = (text: string): string[] => text.split(",").filter((item) => item.trim());
const valuesOf = (text: string): Record<string, string> =>
  Object.fromEntries(
    items(text).map((item) => {
      const [name, , value] = partition(item, "=");
      return [name === "world_size" ? "world" : name, value];
    }),
  );

const axesOf = (text: string): { name: string; size: string }[] =>
  items(text).map((item) => {
    const [name, , size] = partition(item, "=");
    return { name, size };
  });

function viewOf(text: string): AxesLayout {
  const [view] = partition(text, ":");
  return { view, axes: axesOf(text.slice(text.indexOf(":") + 1)) };
}

/** The SPEC of a form; arguments that are empty are left out. */
export function specOf(form: Form): string {
  if (form.type === "axes")
    return form.layouts
      .map(
        ({ view, axes }) =>
          (view === null ? "" : `${view}:`) + axes.map((axis) => `${axis.name}=${axis.size}`).join(","),
      )
      .join("/");
  const known = Object.keys(RECIPES[form.recipe].parameters);
  const written = known.filter((name) => form.values[name]).map((name) => `${name}=${form.values[name]}`);
  return `${form.recipe}:${written.join(",")}`;
}

/** A size changed: views follow along the axes that they share with the mesh, and take what is left elsewhere. */
export function resized(form: AxesForm, view: string | null, axis: string, size: string): AxesForm {
  const layouts = form.layouts.map((layout) => {
    const shares = layout.view === view || view === null;
    const axes = layout.axes.map((each) => (shares && each.name === axis ? { ...each, size } : each));
    return { ...layout, axes };
  });
  return {
    ...form,
    layouts: layouts.map((layout) => (layout.view === null ? layout : refitted(layout, layouts[0], axis))),
  };
}

/** A view whose product is no longer that of the mesh: one of its own axes becomes what is left. */
function refitted(layout: AxesLayout, mesh: AxesLayout, changed: string): AxesLayout {
  if (layout.axes.some((axis) => axis.size === "*")) return layout;
  const total = product(mesh);
  if (total === null || product(layout) === total) return layout;
  const shared = new Set(mesh.axes.map((axis) => axis.name));
  const local = layout.axes.filter((axis) => !shared.has(axis.name) && axis.name !== changed);
  const open = local.find((axis) => axis.name.endsWith("dp")) ?? local.at(-1);
  if (!open) return layout;
  const rest = product({
    ...layout,
    axes: layout.axes.filter((axis) => axis !== open),
  });
  if (!rest || total % rest) return layout;
  return {
    ...layout,
    axes: layout.axes.map((axis) => (axis === open ? { ...axis, size: `${total / rest}` } : axis)),
  };
}

function product(layout: AxesLayout): number | null {
  const sizes = layout.axes.map((axis) => int(axis.size));
  return sizes.every((size) => size !== undefined) ? sizes.reduce((total, size) => total * size, 1) : null;
}

/** An axis moved to another place in its order. */
export function moved(form: AxesForm, view: string | null, from: number, to: number): AxesForm {
  const layouts = form.layouts.map((layout) =>
    layout.view === view ? { ...layout, axes: shifted(layout.axes, from, to) } : layout,
  );
  return { ...form, layouts };
}

export function shifted<T>(list: readonly T[], from: number, to: number): T[] {
  const rest = list.filter((_, place) => place !== from);
  return to < 0 || to > rest.length ? [...list] : [...rest.slice(0, to), list[from], ...rest.slice(to)];
}

/** An axis more, of size 2, last in its layout. */
export function widened(form: AxesForm, view: string | null, name: string): AxesForm {
  const layouts = form.layouts.map((layout) =>
    layout.view === view ? { ...layout, axes: [...layout.axes, { name, size: "2" }] } : layout,
  );
  return {
    ...form,
    layouts: layouts.map((layout) => (layout.view === null ? layout : refitted(layout, layouts[0], name))),
  };
}

export function narrowed(form: AxesForm, view: string | null, name: string): AxesForm {
  const layouts = form.layouts
    .map((layout) =>
      layout.view === view ? { ...layout, axes: layout.axes.filter((axis) => axis.name !== name) } : layout,
    )
    .filter((layout) => layout.view === null || layout.axes.length);
  return {
    ...form,
    layouts: layouts.map((layout) => (layout.view === null ? layout : refitted(layout, layouts[0], name))),
  };
}

/** A view for experts: the axes after the first ones are shared, the rest are experts and their replicas. */
export function withExperts(form: AxesForm): AxesForm {
  const mesh = form.layouts[0];
  const last = mesh.axes.at(-1);
  const pp = last?.name === "pp" ? [last] : [];
  const layout = {
    view: "expert",
    axes: [{ name: "ep", size: "2" }, { name: "edp", size: "*" }, ...pp],
  };
  return { ...form, layouts: [...form.layouts, layout] };
}

/** The same sizes as another recipe, or as axes, as far as both know them. */
export function translated(form: Form, target: string, mesh: readonly (readonly [string, number])[]): Form {
  const sizes: Record<string, string> = Object.fromEntries(mesh.map(([name, size]) => [name, `${size}`]));
  if (target === "axes")
    return {
      type: "axes",
      layouts: [
        {
          view: null,
          axes: mesh.map(([name, size]) => ({ name, size: `${size}` })),
        },
      ],
    };
  const known = Object.keys(RECIPES[target].parameters);
  const old = form.type === "recipe" ? form.values : sizes;
  const world = mesh.reduce((total, [, size]) => total * size, 1);
  const kept = known.filter(
    (name) => name !== "dp" && name !== "dp_shard" && old[name] && old[name] !== "1" && int(old[name]) !== undefined,
  );
  const values = Object.fromEntries(kept.map((name) => [name, old[name]]));
  return {
    type: "recipe",
    recipe: target,
    values: { world: `${world}`, ...values },
  };
}

/** The size above or below in the powers of two; another size is doubled or halved as far as it is whole. */
export function stepped(size: string, up: boolean): string {
  const number = int(size) ?? 1;
  if (up) return `${number * 2}`;
  return `${number % 2 ? Math.max(1, number - 1) : number / 2}`;
}

export const fresh = (name: string, taken: readonly string[]): boolean => isIdentifier(name) && !taken.includes(name);
