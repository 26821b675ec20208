/** The layout in other words: as SPEC, as Python, as Megatron's arguments. */
import { GIVEN, type Given } from "./given";
import { formOf, type RecipeForm } from "./form";
import type { Plan } from "../formula/plan";
import { RECIPES, resolved } from "../formula/source";
import { planError, quoted, repr } from "../formula/messages";

export const specText = (spec: string, world: number | null): string =>
  spec.includes("*") && world !== null ? `'${spec}' --world-size ${world}` : resolved(spec);

/** Python that makes the same plan. */
export function pythonOf(spec: string, plan: Plan, given: Given): string {
  if (spec === GIVEN)
    return `import rankmesh as rm\n\nplan = rm.read(${repr(given.state.spec === GIVEN ? (given.title ?? "plan.json") : "plan.json")})`;
  const form = formOf(spec);
  if (form?.type === "recipe") return `import rankmesh as rm\n\nplan = rm.recipes.${form.recipe}(${argumentsOf(form)})`;
  const { mesh } = plan;
  const sizes = (axes: ReadonlyMap<string, number>): string =>
    [...axes].map(([name, size]) => `${name}=${size}`).join(", ");
  const views = [...mesh.views]
    .map(([name, view]) => `\nmesh = mesh.with_view(${repr(name)}, ${sizes(view.sizes)})`)
    .join("");
  return `import rankmesh as rm\n\nmesh = rm.Mesh(${sizes(mesh.sizes)})${views}\nplan = rm.recipes.axes(mesh)`;
}

function argumentsOf({ recipe, values }: RecipeForm): string {
  const { parameters } = RECIPES[recipe];
  const written = Object.entries(values)
    .filter(([, value]) => value)
    .map(([name, value]) => {
      const kind = parameters[name];
      const flag = ["true", "yes", "1"].includes(value.toLowerCase()) ? "True" : "False";
      const written = {
        int: value,
        float: value,
        str: repr(value),
        bool: flag,
        sizes: `(${value.replaceAll("x", ", ")},)`,
      }[kind];
      return `${name === "world" ? "world_size" : name}=${written}`;
    });
  return written.join(", ");
}

const FLAGS: Record<string, string> = {
  tp: "--tensor-model-parallel-size",
  cp: "--context-parallel-size",
  pp: "--pipeline-model-parallel-size",
  ep: "--expert-model-parallel-size",
  etp: "--expert-tensor-parallel-size",
  optimizer_instances: "--num-distributed-optimizer-instances",
};

/** A launch of Megatron with the same layout; what Megatron's arguments cannot say is refused with the reason. */
export function megatronOf(spec: string, plan: Plan, devices: number): string {
  const form = formOf(spec);
  const values = form?.type === "recipe" ? ofRecipe(form) : form ? ofAxes(plan) : null;
  if (!values) throw planError("a saved plan has no Megatron arguments; write the layout as megatron:world=...");
  const order = values.order ?? "tp-cp-ep-dp-pp";
  const flags = Object.entries(FLAGS).flatMap(([name, flag]) =>
    values[name] && (values[name] !== "1" || name === "etp") ? [`${flag} ${values[name]}`] : [],
  );
  if (order === "tp-cp-ep-pp-dp") flags.push("--use-tp-pp-dp-mapping");
  else if (order !== "tp-cp-ep-dp-pp")
    throw planError(
      `Megatron has no argument for order ${quoted(order)}; use tp-cp-ep-dp-pp, or tp-cp-ep-pp-dp ` +
        "with --use-tp-pp-dp-mapping",
    );
  if (values.hierarchical_cp)
    flags.push(`--hierarchical-context-parallel-sizes ${values.hierarchical_cp.replaceAll("x", " ")}`);
  if (["true", "yes", "1"].includes(values.hybrid_cp?.toLowerCase() ?? "")) flags.push("--hybrid-context-parallel");
  const stranger = Object.keys(values).find((name) => !KNOWN.has(name) && values[name]);
  if (stranger !== undefined)
    throw planError(`Megatron has no argument for ${stranger}=${values[stranger]}; leave it out`);
  return [`torchrun ${launch(plan.worldSize, devices)} pretrain_gpt.py`, ...flags].join(" \\\n    ");
}

type Values = Partial<Record<string, string>>;

const KNOWN = new Set([...Object.keys(FLAGS), "world", "dp", "order", "hierarchical_cp", "hybrid_cp"]);

const launch = (world: number, devices: number): string =>
  world % devices ? `--nproc-per-node ${world}` : `--nnodes ${world / devices} --nproc-per-node ${devices}`;

function ofRecipe({ recipe, values }: RecipeForm): Values {
  if (recipe !== "megatron")
    throw planError(`the groups of a ${recipe} layout are not Megatron's; write it as megatron:world=...`);
  return values;
}

/** Axes in the order of Megatron, with its view for experts or none. */
function ofAxes(plan: Plan): Values {
  const { mesh } = plan;
  const stranger = mesh.names.find((name) => !["tp", "cp", "dp", "pp"].includes(name));
  if (stranger !== undefined)
    throw planError(`axis ${quoted(stranger)} is not of Megatron's mesh; rename it to one of tp, cp, dp, pp`);
  const sized = mesh.names.filter((name) => mesh.sizes.get(name)! > 1);
  const order = ["tp-cp-dp-pp", "tp-cp-pp-dp"].find(
    (text) =>
      sized.join("-") ===
      text
        .split("-")
        .filter((name) => sized.includes(name))
        .join("-"),
  );
  if (!order) throw planError(`Megatron has no order ${quoted(mesh.names.join("-"))}; use tp-cp-dp-pp, or tp-cp-pp-dp`);
  const values: Values = Object.fromEntries(
    [...mesh.sizes].filter(([name]) => name !== "dp").map(([name, size]) => [name, `${size}`]),
  );
  if (mesh.views.size > 1)
    throw planError(
      `the mesh has the views ${repr([...mesh.views.keys()])}; Megatron has one, of the experts; leave the others out`,
    );
  const [name] = mesh.views.keys();
  const view = mesh.views.get(name);
  if (view && !view.names.every((axis) => ["etp", "ep", "edp", "pp"].includes(axis)))
    throw planError(
      `the axes of view ${quoted(name)} are ${view.toString()}; rename them to Megatron's etp, ep, edp, pp`,
    );
  if (view) {
    values.ep = `${view.sizes.get("ep") ?? 1}`;
    values.etp = `${view.sizes.get("etp") ?? 1}`;
  }
  return order === "tp-cp-pp-dp" && sized.includes("pp") && sized.includes("dp")
    ? { ...values, order: "tp-cp-ep-pp-dp" }
    : values;
}
