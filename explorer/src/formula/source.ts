/**
 * A plan from what a user types.
 *
 *     tp=2,dp=4,pp=2/expert:etp=1,ep=8,edp=1,pp=2     an axis string with a view
 *     megatron:world=64,tp=2,pp=2,ep=4                a recipe
 *     llama3-405b                                     a preset
 */
import presetData from "../../../src/rankmesh/core/presets.json";
import { fill, int, parseAxes, partition } from "./axes";
import { Mesh } from "./mesh";
import { fitting, type Plan } from "./plan";
import { megatron } from "./recipes/megatron";
import { sglang, vllm } from "./recipes/serving";
import { accelerate, axes, deepspeed, ezpz, nanotron, threeD, torchtitan, type Arguments } from "./recipes/training";
import { layoutError, nearest, planError, quoted, repr } from "./messages";

export interface Preset {
  title: string;
  spec: string;
  gpus_per_node: number;
  source: string;
  note?: string;
}

export const PRESETS: Readonly<Partial<Record<string, Preset>>> = presetData;

type Kind = "int" | "str" | "bool" | "float" | "sizes";
type Value = number | string | boolean | number[];

interface Recipe {
  /** The arguments in order, as they are typed, each of a kind. */
  readonly parameters: Readonly<Record<string, Kind>>;
  readonly make: (given: Record<string, Value>) => Plan;
}

const numbers = (...names: string[]): Record<string, Kind> => Object.fromEntries(names.map((name) => [name, "int"]));
const plain = (names: string, make: (given: Arguments) => Plan): Recipe => ({
  parameters: numbers(...names.split(" ")),
  make: (given) => make(given as Arguments),
});

export const RECIPES: Readonly<Record<string, Recipe>> = {
  megatron: {
    parameters: {
      ...numbers("world", "tp", "cp", "dp", "pp", "ep", "etp", "gtp", "egtp"),
      order: "str",
      optimizer_instances: "int",
      hierarchical_cp: "sizes",
      hybrid_cp: "bool",
      all_gather: "bool",
      gloo: "bool",
      pp_backend: "str",
      timeout: "float",
    },
    make: (given) => megatron(given),
  },
  nanotron: plain("world tp cp dp pp ep local_world_size", nanotron),
  ezpz: plain("world tp cp pp dp", ezpz),
  three_d: plain("world tp pp dp", threeD),
  torchtitan: plain("world dp_replicate dp_shard cp tp pp ep etp", torchtitan),
  accelerate: plain("world dp_replicate dp_shard cp sp tp", accelerate),
  deepspeed: plain("world tp sp dp ep hpz mics", deepspeed),
  vllm: {
    parameters: { ...numbers("world", "tp", "pp", "dp", "pcp", "dcp"), eplb: "bool" },
    make: ({ eplb, ...sizes }) => vllm(sizes as Arguments, eplb === true),
  },
  sglang: plain("world tp pp attn_dp attn_cp ep moe_dp dcp shared_experts_tp", sglang),
};

/** Worlds that are listed: as many ranks as the command lists. */
export const LIMIT = 2 ** 22;

const FORMS =
  "write an axis string (tp=2,dp=4), a recipe (megatron:world=64,tp=2,pp=2), a preset (llama3-405b), " +
  "or the path of a saved plan (plan.json) or of a training config (train.sh, train.toml, config.yaml, ds.json)";

/** The plan that a SPEC describes; `worldSize` fills a `*` and must fit the rest. */
export function read(text: string, worldSize: number | null = null): Plan {
  const plan = fitting(planOf(text.trim(), worldSize), text, worldSize);
  if (plan.worldSize > LIMIT)
    throw layoutError(
      `the world has ${plan.worldSize.toLocaleString("en")} ranks, but the command lists up to ` +
        `${LIMIT.toLocaleString("en")}; ask the library for one rank: plan.of(rank)`,
    );
  return plan;
}

/** What a SPEC stands for: the text of a preset's layout, or the text itself. */
export const resolved = (text: string): string => PRESETS[text.trim()]?.spec ?? text.trim();

function planOf(text: string, worldSize: number | null): Plan {
  const preset = PRESETS[text];
  if (preset) return read(preset.spec);
  const [name, colon] = partition(text, ":");
  if (colon && name in RECIPES) return recipe(name, text.slice(text.indexOf(":") + 1), worldSize);
  const first = text.split("/")[0];
  if (first.includes("=") && !first.includes(":")) return ofAxes(text, worldSize);
  const near = nearest(colon ? name : text, [...Object.keys(RECIPES), ...Object.keys(PRESETS)], 0.6);
  throw planError(`unknown layout ${quoted(text)}; ${near === undefined ? FORMS : `did you mean ${repr(near)}?`}`);
}

function ofAxes(text: string, worldSize: number | null): Plan {
  const [sizes, ...views] = text.split("/");
  let mesh = Mesh.parse(sizes, worldSize);
  for (const view of views) {
    const colon = view.indexOf(":");
    if (colon < 0) throw planError(`view ${quoted(view)} has no colon; write name:axes, such as expert:ep=4,edp=2`);
    mesh = mesh.withView(
      view.slice(0, colon).trim(),
      fill(parseAxes(view.slice(colon + 1)), mesh.size, "size of the mesh"),
    );
  }
  return axes(mesh);
}

function recipe(name: string, text: string, worldSize: number | null): Plan {
  const { parameters, make } = RECIPES[name];
  const given: Record<string, Value> = {};
  const items = text.split(",").map((part) => part.trim());
  for (const item of items.filter(Boolean)) {
    const [key, equals, value] = partition(item, "=");
    const typed = key === "world_size" ? "world" : key;
    if (!equals || !(typed in parameters))
      throw planError(
        `${quoted(item)} is not an argument of recipe ${repr(name)}; write name=value, where name is one of ` +
          Object.keys(parameters).join(", "),
      );
    const argument = typed === "world" ? "world_size" : key;
    if (argument in given) throw planError(`recipe ${repr(name)} has ${quoted(key)} twice; give it once`);
    given[argument] = converted(name, key, value, parameters[typed]);
  }
  if (worldSize !== null && !("world_size" in given)) given.world_size = worldSize;
  return make(given);
}

const FLAGS: Record<string, boolean> = {
  true: true,
  yes: true,
  1: true,
  false: false,
  no: false,
  0: false,
};
const TEXT: Record<Kind, string> = {
  sizes: "sizes joined by x, such as 2x4",
  bool: "true or false",
  float: "a number of seconds",
  int: "a whole number",
  str: "a word",
};

const CONVERT: Record<Kind, (text: string) => Value | undefined> = {
  int,
  str: (text) => text,
  bool: (text) => FLAGS[text.toLowerCase()],
  float: (text) => (/^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(text) ? Number(text) : undefined),
  sizes: (text) => {
    const sizes = text.split("x").map(int);
    return sizes.includes(undefined) ? undefined : (sizes as number[]);
  },
};

function converted(name: string, key: string, text: string, kind: Kind): Value {
  const value = CONVERT[kind](text);
  if (value !== undefined) return value;
  throw planError(`${key} is ${quoted(text)} in recipe ${repr(name)}; write ${TEXT[kind]}`);
}
