/**
 * Megatron-Core's groups, dense and expert.
 *
 *     order tp-cp-ep-dp-pp      mesh     tp, cp, dp, pp        attention and dense layers
 *                               expert   etp, ep, edp, pp      experts: the same ranks, the same pp
 */
import { axisNames, axisSize, integer, product, times } from "../axes";
import { Mesh } from "../mesh";
import { Plan, spec, type Options, type Spec } from "../plan";
import { float, planError, quoted, repr } from "../messages";
import { divided, worldAndDp } from "./sizes";

export interface MegatronArguments {
  world_size?: number;
  tp?: number;
  cp?: number;
  dp?: number;
  pp?: number;
  ep?: number;
  etp?: number;
  gtp?: number;
  egtp?: number;
  order?: string;
  optimizer_instances?: number;
  hierarchical_cp?: readonly number[];
  hybrid_cp?: boolean;
  all_gather?: boolean;
  gloo?: boolean;
  pp_backend?: string;
  timeout?: number;
}

export const DEFAULT_ORDER = "tp-cp-ep-dp-pp";
// Seconds of Python's longest timedelta.
const LONGEST = 86400e9;
const EXPERT_NAMES: Record<string, string> = {
  tp: "etp",
  ep: "ep",
  gtp_remat: "egtp_remat",
  dp: "edp",
  pp: "pp",
};

export function megatron(given: MegatronArguments): Plan {
  const { tp = 1, cp = 1, pp = 1, ep = 1, gtp = 1, egtp = 1, order = DEFAULT_ORDER } = given;
  const sizes = { ...given, tp, cp, pp, ep, gtp, egtp, order };
  let mesh = megatronMesh(sizes);
  const dpCp = mesh.sizes.get("dp")! * mesh.sizes.get("cp")!;
  const instances = axisSize("optimizer_instances", given.optimizer_instances ?? 1);
  const shards = [divided(dpCp, instances, "dp x cp", "optimizer_instances"), instances];
  const expertDp = mesh.view("expert").sizes.get("edp")!;
  const expertShards = [divided(expertDp, instances, "edp", "optimizer_instances"), instances];
  checkRemat(instances, gtp, egtp);
  if (instances > 1)
    mesh = mesh.splitView(
      "expert",
      "edp",
      new Map([
        ["edp_intra", expertShards[0]],
        ["edp_inter", instances],
      ]),
    );
  const gloo = Boolean(given.gloo) && gtp === 1;
  const whole = gtp > 1 ? ["gtp_remat"] : [];
  const expertWhole = egtp > 1 ? ["egtp_remat"] : [];
  const specs = [
    ...data(shards, given.all_gather ?? false, gloo),
    ...hybrid(dpCp, given.hybrid_cp ?? false),
    spec("dp"),
    ...(gloo ? [spec("dp_gloo", "dp", { options: { backend: "gloo" } })] : []),
    spec("cp"),
    ...hierarchy(given.hierarchical_cp),
    spec("mp", ["tp", ...whole, "pp"]),
    spec("tp"),
    spec("pp", "pp", backend(given.pp_backend)),
    spec("embd", "pp", { pick: [0, -1] }),
    spec("pos_embd", "pp", { pick: [0] }),
    spec("tp_dp_cp", ["tp", ...whole, "dp", "cp"]),
    spec("tp_dp", ["tp", ...whole, "dp"]),
    spec("tp_cp", "tp-cp"),
    ...expert(expertShards, gloo && egtp === 1, expertWhole),
    ...remat(whole, expertWhole),
  ];
  return new Plan(mesh, inherited(specs, given.timeout), given.world_size ?? mesh.size);
}

type Filled = MegatronArguments &
  Required<Pick<MegatronArguments, "tp" | "cp" | "pp" | "ep" | "gtp" | "egtp" | "order">>;

function megatronMesh({ world_size, tp, cp, dp, pp, ep, etp: given, gtp, egtp, order }: Filled): Mesh {
  const etp = given ?? tp;
  const remat: Record<string, number> = gtp !== 1 ? { gtp } : {};
  const expertRemat: Record<string, number> = egtp !== 1 ? { egtp } : {};
  const [world, replicas] = worldAndDp(world_size, dp, {
    tp,
    ...remat,
    cp,
    pp,
  });
  const expertDp = dpOfExperts(world, given, tp, { ep, ...expertRemat, pp });
  const dense: Record<string, number> = { tp, cp, dp: replicas, pp };
  const experts: Record<string, number> = { tp: etp, ep, dp: expertDp, pp };
  const most = {
    ...dense,
    ...experts,
    tp: Math.max(tp, etp),
    dp: Math.max(replicas, expertDp),
  };
  if (gtp !== 1) dense.gtp_remat = gtp;
  if (egtp !== 1) experts.gtp_remat = egtp;
  const ofMesh = tokens(order, most, "tp").filter((name) => name in dense);
  const ofView = tokens(order, most, "ep").filter((name) => name in experts);
  const mesh = Mesh.of(ofMesh.map((name) => [name, dense[name]] as const));
  return mesh.withView("expert", new Map(ofView.map((name) => [EXPERT_NAMES[name], experts[name]])), ["pp"]);
}

/** What the sizes of the experts leave of the world. */
function dpOfExperts(world: number, etp: number | undefined, tp: number, others: Record<string, number>): number {
  const sizes = new Map(Object.entries({ etp: etp ?? tp, ...others }));
  const block = product([...sizes].map(([name, size]) => axisSize(name, size)));
  if (world % block === 0) return world / block;
  let [why, fix] = ["", `use a multiple of ${block} ranks, or change a size`];
  const ep = others.ep;
  const smaller = Array.from({ length: ep - 1 }, (_, place) => ep - 1 - place);
  const fits = smaller.filter((size) => ep % size === 0 && world % ((block / ep) * size) === 0);
  if (fits.length) {
    const also = fits.length > 1 ? ` (${fits.slice(1).join(", ")} fit, too)` : "";
    fix = `set ep=${fits[0]}, which fits${also}, or use a multiple of ${block} ranks`;
  }
  if (etp === undefined && tp > 1) {
    why = ", as etp defaults to tp";
    fix = world % (block / tp) === 0 ? "set etp=1, which fits" : `set etp and ${fix}`;
  }
  throw planError(`world_size is ${world}, but ${times(sizes)} = ${block} does not divide it${why}; ${fix}`);
}

/** The axes in their order; `gtp_remat` follows `after`, or tp, unless the order names it. */
function tokens(order: string, sizes: Record<string, number>, after: string): string[] {
  let names = axisNames(order.toLowerCase());
  if (!names.includes("gtp_remat")) {
    const anchor = names.includes(after) ? after : "tp";
    const place = names.indexOf(anchor) + 1;
    names = [...names.slice(0, place), "gtp_remat", ...names.slice(place)];
  }
  const stranger = names.find((name) => !(name in sizes) && name !== "gtp_remat");
  if (stranger !== undefined)
    throw planError(
      `order ${quoted(order)} names ${repr(stranger)}, none of ${Object.keys(sizes).join(", ")}; remove it`,
    );
  const missing = Object.keys(sizes).filter((name) => !names.includes(name));
  const needed = missing.find((name) => sizes[name] > 1);
  if (needed !== undefined)
    throw planError(`order ${quoted(order)} leaves out ${repr(needed)}, whose size is ${sizes[needed]}; add it`);
  return [...names, ...missing];
}

const gloo = { options: { backend: "gloo" } };

function backend(name: string | undefined): { options?: Options } {
  if (name === undefined) return {};
  if (!name) throw planError(`backend is ${quoted(name)}; give a name, such as 'gloo'`);
  return { options: { backend: name } };
}

/** The specs with a timeout for all of them. */
function inherited(specs: readonly Spec[], timeout: number | undefined): readonly Spec[] {
  if (timeout === undefined) return specs;
  if (!(timeout > 0 && timeout <= LONGEST))
    throw planError(`timeout is ${float(timeout)}; give a number of seconds above 0, or a timedelta`);
  return specs.map((each) => ({
    ...each,
    options: { timeout, ...each.options },
  }));
}

function data(levels: readonly number[], allGather: boolean, withGloo: boolean): Spec[] {
  return [
    spec("dp_cp", "dp-cp"),
    ...(allGather ? [spec("dp_cp_ag", "dp-cp", { options: { overlap: "all_gather" } })] : []),
    spec("intra_dp_cp", "dp-cp", { levels, level: 0 }),
    ...(withGloo
      ? [spec("dp_cp_gloo", "dp-cp", gloo), spec("intra_dp_cp_gloo", "dp-cp", { levels, level: 0, ...gloo })]
      : []),
  ];
}

/** Groups of 2, 4, 8, ... up to half of dp_cp. */
function hybrid(size: number, wanted: boolean): Spec[] {
  if (!wanted) return [];
  const parts: number[] = [];
  for (let part = 2; part * 2 <= size; part *= 2) parts.push(part);
  if (size < 2 || size % 2 || parts.some((part) => size % part))
    throw planError(
      `dp x cp is ${size}, which hybrid_cp cannot fill with groups of ${(parts.length ? parts : [2]).join(", ")} ranks; ` +
        "make dp x cp a power of two",
    );
  return parts.map((part) =>
    spec(`hybrid_dp_cp_${part}`, "dp-cp", {
      levels: [part, size / part],
      level: 0,
    }),
  );
}

function hierarchy(sizes: readonly number[] | undefined): Spec[] {
  const levels = (sizes ?? []).map((size) => integer(size, "hierarchical_cp", 1));
  return levels.map((_, level) => spec(`hcp_${level}`, "cp", { levels, level }));
}

function expert(levels: readonly number[], withGloo: boolean, whole: readonly string[]): Spec[] {
  const view = "expert";
  const inner = levels[1] === 1 ? "edp" : "edp_intra";
  return [
    spec("ep", "ep", { view }),
    spec("ep_tp", "etp", { view }),
    spec("tp_ep_mp", "etp-ep", { view }),
    spec("tp_ep_pp", "etp-ep-pp", { view }),
    spec("ep_dp", "edp", { view }),
    spec("intra_ep_dp", "edp", { view, levels, level: 0 }),
    spec("inter_ep_dp", "edp", { view, levels, level: 1 }),
    ...(withGloo
      ? [
          spec("ep_dp_gloo", "edp", { view, ...gloo }),
          spec("intra_ep_dp_gloo", "edp", { view, levels, level: 0, ...gloo }),
        ]
      : []),
    spec("intra_dist_opt_instance", ["etp", "ep", ...whole, inner, "pp"], {
      view,
    }),
  ];
}

/** The groups along the axes of generalised tensor parallelism, and with them. */
function remat(whole: readonly string[], expertWhole: readonly string[]): Spec[] {
  const view = "expert";
  const dense = [spec("gtp_remat"), spec("dp_gtp", [...whole, "dp"]), spec("dp_cp_gtp", [...whole, "dp", "cp"])];
  const experts = [
    spec("expt_gtp_remat", "egtp_remat", { view }),
    spec("ep_dp_gtp", [...expertWhole, "edp"], { view }),
    spec("tp_ep_pp_gtp", ["etp", "ep", ...expertWhole, "pp"], { view }),
  ];
  return [...(whole.length ? dense : []), ...(expertWhole.length ? experts : [])];
}

function checkRemat(instances: number, gtp: number, egtp: number): void {
  if (instances > 1 && (gtp > 1 || egtp > 1))
    throw planError(
      `optimizer_instances is ${instances} with gtp ${gtp} and egtp ${egtp}, but Megatron shards weights with one ` +
        "optimizer instance; make one of them 1",
    );
}
