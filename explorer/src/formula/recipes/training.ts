/**
 * The layouts of other training systems, and of a plain axis string.
 *
 *     nanotron     tp cp dp pp ep                            torchtitan   tp cp dp_shard dp_replicate pp
 *     ezpz         tp cp pp dp                               accelerate   tp sp cp dp_shard dp_replicate
 *     three_d      tp pp dp                                  deepspeed    tp dp | sp dp
 */
import { axisSize, integer } from "../axes";
import { Mesh } from "../mesh";
import { Plan, spec } from "../plan";
import { planError } from "../messages";
import { divided, worldAndDp } from "./sizes";

export interface Arguments {
  world_size?: number;
  [name: string]: number | undefined;
}

export function nanotron({ world_size, tp = 1, cp = 1, dp, pp = 1, ep = 1, local_world_size }: Arguments): Plan {
  const requested = dp === undefined && world_size === undefined ? 1 : dp;
  const [world, data] = worldAndDp(world_size, requested, { tp, cp, pp, ep });
  const every = "tp-cp-dp-pp-ep";
  const specs = [spec("world", every)];
  if (local_world_size !== undefined) {
    const local = integer(local_world_size, "local_world_size", 1);
    const hosts = divided(world, local, "world_size", "local_world_size");
    specs.push(spec("local", every, { levels: [local, hosts], level: 0 }));
  }
  specs.push(...["tp", "cp", "dp", "pp", "ep"].map((name) => spec(name)));
  specs.push(spec("mp", "tp-pp-ep"), spec("dp_cp", "dp-cp"), spec("tp_ep", "tp-ep"));
  return new Plan(meshOf({ tp, cp, dp: data, pp, ep }), specs, world);
}

export function ezpz({ world_size, tp = 1, cp = 1, pp = 1, dp }: Arguments): Plan {
  const [world, data] = worldAndDp(world_size, dp, { tp, cp, pp });
  const specs = ["dp", "tp", "pp", "cp"].map((name) => spec(name));
  return new Plan(meshOf({ tp, cp, pp, dp: data }), specs, world);
}

export function threeD({ world_size, tp = 1, pp = 1, dp }: Arguments): Plan {
  const [world, data] = worldAndDp(world_size, dp, { tp, pp });
  const specs = ["tp", "pp", "dp"].map((name) => spec(name));
  return new Plan(meshOf({ tp, pp, dp: data }), specs, world);
}

export function torchtitan({
  world_size,
  dp_replicate = 1,
  dp_shard,
  cp = 1,
  tp = 1,
  pp = 1,
  ep = 1,
  etp,
}: Arguments): Plan {
  const [world, shard] = worldAndDp(world_size, dp_shard, {
    dp_replicate,
    cp,
    tp,
    pp,
  });
  const expertTp = axisSize("etp", etp ?? 1);
  if (expertTp !== 1 && expertTp !== tp)
    throw planError(
      `etp is ${expertTp} with tp ${tp}, but torchtitan shards an expert like a dense layer or not at all; ` +
        `use etp=1 or etp=${tp}`,
    );
  const efsdp = divided(shard * cp * tp, expertTp * axisSize("ep", ep), "dp_shard x cp x tp", "etp x ep");
  const view = { etp: expertTp, ep, efsdp, dp_replicate, pp };
  const mesh = meshOf({ tp, cp, dp_shard: shard, dp_replicate, pp }).withView("expert", new Map(Object.entries(view)));
  const specs = [
    spec("pp"),
    spec("batch", "dp_replicate-dp_shard"),
    spec("loss", "dp_replicate-dp_shard-cp"),
    spec("dp_replicate"),
    spec("dp_shard"),
    spec("fsdp", "dp_shard-cp"),
    spec("cp"),
    spec("tp"),
    ...["ep", "efsdp", "etp"].map((name) => spec(name, name, { view: "expert" })),
  ];
  return new Plan(mesh, specs, world);
}

const FLATTENED: Record<string, string[]> = {
  dp: ["dp_replicate", "dp_shard"],
  dp_shard_cp: ["dp_shard", "cp"],
  dp_cp: ["dp_replicate", "dp_shard", "cp"],
};

export function accelerate({ world_size, dp_replicate = 1, dp_shard, cp = 1, sp = 1, tp = 1 }: Arguments): Plan {
  const [world, shard] = worldAndDp(world_size, dp_shard, {
    dp_replicate,
    cp,
    sp,
    tp,
  });
  if (cp > 1 && sp > 1)
    throw planError(
      `cp is ${cp} and sp is ${sp}, but Accelerate shards a sequence in one of the two ways; leave one at 1`,
    );
  if (Math.max(tp, cp) > 1 && dp_replicate > 1 && shard === 1)
    throw planError(
      `dp_replicate is ${dp_replicate} and dp_shard 1 with tp ${tp} and cp ${cp}, but Accelerate combines tp and ` +
        "cp with shards, not with replicas alone; use dp_shard > 1",
    );
  const sizes = Object.entries({
    tp,
    sp,
    cp,
    dp_shard: shard,
    dp_replicate,
  }).filter(([, size]) => size > 1);
  const kept = sizes.length ? Object.fromEntries(sizes) : { dp_replicate: 1 };
  const specs = Object.keys(kept)
    .reverse()
    .map((name) => spec(name));
  for (const [name, axes] of Object.entries(FLATTENED)) {
    const present = axes.filter((axis) => axis in kept);
    if (present.length) specs.push(spec(name, present));
  }
  return new Plan(meshOf(kept), specs, world);
}

export function deepspeed({ world_size, tp = 1, sp = 1, dp, ep = 1, hpz = 1, mics = 1 }: Arguments): Plan {
  const [world, data] = worldAndDp(world_size, dp, { tp, sp });
  if (tp > 1 && sp > 1)
    throw planError(`tp is ${tp} and sp is ${sp}, but DeepSpeed makes a mesh of dp and one of them; leave one at 1`);
  const inner: Record<string, number> = sp > 1 ? { sp } : { tp };
  let mesh = meshOf({ ...inner, dp: data });
  const every = mesh.names;
  const specs = [spec("world", every), spec("dp"), ...Object.keys(inner).map((name) => spec(name))];
  if (axisSize("ep", ep) > 1) {
    const lanes: Record<string, number> = sp > 1 ? {} : { tp };
    const edp = divided(sp > 1 ? world : world / tp, ep, "dp", "ep");
    mesh = mesh.withView("expert", new Map(Object.entries({ ...lanes, ep, edp })));
    specs.push(spec("ep", "ep", { view: "expert" }), spec("edp", "edp", { view: "expert" }));
  }
  if (axisSize("hpz", hpz) > 1)
    specs.push(
      spec("hpz", every, {
        levels: [hpz, divided(world, hpz, "world_size", "hpz")],
        level: 0,
      }),
    );
  if (axisSize("mics", mics) > 1) {
    const levels = [mics, divided(world, mics, "world_size", "mics")];
    specs.push(...["shard", "replicate"].map((part, level) => spec(`mics_${part}`, every, { levels, level })));
  }
  return new Plan(mesh, specs, world);
}

/** One group for each axis of the mesh and of its views, and the usual unions. */
export function axes(mesh: Mesh, worldSize: number | null = null): Plan {
  const specs = mesh.names.map((name) => spec(name));
  const taken = new Set(mesh.names);
  for (const [view, other] of mesh.views) {
    const fresh = other.names.filter((name) => !taken.has(name));
    specs.push(...fresh.map((name) => spec(name, name, { view })));
    fresh.forEach((name) => taken.add(name));
  }
  const unions = [spec("dp_cp", "dp-cp"), spec("embd", "pp", { pick: [0, -1] })];
  const fits = unions.filter((union) => !taken.has(union.name) && union.axes.every((axis) => mesh.sizes.has(axis)));
  return new Plan(mesh, [...specs, ...fits], worldSize ?? mesh.rankRange.stop);
}

export const meshOf = (sizes: Record<string, number>): Mesh => Mesh.of(Object.entries(sizes));
