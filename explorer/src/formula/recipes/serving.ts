/**
 * The layouts of vLLM and SGLang, which serve models.
 *
 *     vLLM      mesh   tp pcp pp dp replica     decode   dcp dtp ... | dtp dcp ...
 *     SGLang    mesh   tp pp                    attention, experts, decode: other factorisations of tp
 */
import { axisSize, integer } from "../axes";
import { Plan, spec, type Spec } from "../plan";
import { planError } from "../messages";
import { divided } from "./sizes";
import { meshOf, type Arguments } from "./training";

export function vllm(given: Arguments, eplb = false): Plan {
  const { world_size, tp = 1, pp = 1, dp = 1, pcp = 1, dcp = 1 } = given;
  const sizes = { tp, pcp, pp, dp };
  const [world, replica] = worldAndRest(world_size, sizes);
  const inner = decode(tp, pcp, axisSize("dcp", dcp));
  const outer = { pp, dp, replica };
  const view = new Map(Object.entries({ ...inner, ...outer }));
  const mesh = meshOf({ ...sizes, replica }).withView("decode", view, Object.keys(outer));
  const specs = ["tp", "pcp", "pp", "dp"].map((name) => spec(name));
  const overBoth = Math.min(tp, pcp) > 1 && dcp === tp * pcp;
  // vLLM counts the members along pcp first.
  const order = Array.from({ length: dcp }, (_, place) => (place % pcp) * tp + Math.floor(place / pcp));
  specs.push(spec("dcp", "dcp", { view: "decode", ...(overBoth ? { pick: order } : {}) }), spec("ep", "tp-pcp-dp"));
  if (eplb) specs.push(spec("eplb", "tp-pcp-dp", { options: { share: false } }));
  return new Plan(mesh, specs, world);
}

/** The world, and what the sizes leave of it: nothing where no world is given. */
function worldAndRest(worldSize: number | undefined, sizes: Record<string, number>): [number, number] {
  const engine = Object.entries(sizes).reduce((total, [name, size]) => total * axisSize(name, size), 1);
  const world = worldSize === undefined ? engine : integer(worldSize, "world_size", 1);
  return [world, divided(world, engine, "world_size", Object.keys(sizes).join(" x "))];
}

/** How decoding cuts the ranks of one stage, adjacent first. */
function decode(tp: number, pcp: number, dcp: number): Record<string, number> {
  if (pcp === 1) return { dcp, dtp: divided(tp, dcp, "tp", "dcp") };
  if (![1, pcp, tp * pcp].includes(dcp))
    throw planError(
      `dcp is ${dcp} with tp ${tp} and pcp ${pcp}, but with pcp vLLM decodes over none, all of pcp, or all of ` +
        `tp x pcp; use 1, ${pcp} or ${tp * pcp}`,
    );
  return { dtp: (tp * pcp) / dcp, dcp };
}

export function sglang(given: Arguments): Plan {
  const {
    world_size,
    tp = 1,
    pp = 1,
    attn_dp = 1,
    attn_cp = 1,
    ep = 1,
    moe_dp = 1,
    dcp = 1,
    shared_experts_tp,
  } = given;
  const [world, rest] = worldAndRest(world_size, { tp, pp });
  if (rest !== 1)
    throw planError(
      `world_size is ${world}, but an SGLang engine has tp ${tp} x pp ${pp} = ${tp * pp} ranks; leave ` +
        "world_size out, or change a size",
    );
  const cut = axisSize("attn_dp", attn_dp) * axisSize("attn_cp", attn_cp);
  const attnTp = divided(tp, cut, "tp", "attn_dp x attn_cp");
  const moeTp = divided(tp, axisSize("ep", ep) * axisSize("moe_dp", moe_dp), "tp", "ep x moe_dp");
  const view = (sizes: Record<string, number>): Map<string, number> => new Map(Object.entries({ ...sizes, pp }));
  let mesh = meshOf({ tp, pp })
    .withView("attention", view({ attn_tp: attnTp, attn_cp, attn_dp }), ["pp"])
    .withView("experts", view({ moe_tp: moeTp, moe_ep: ep, moe_dp }), ["pp"]);
  const on = (name: string): Omit<Spec, "name" | "axes"> => ({ view: name });
  const specs = [spec("tp"), spec("pp")];
  specs.push(...["attn_tp", "attn_cp", "attn_dp"].map((name) => spec(name, name, on("attention"))));
  specs.push(...["moe_tp", "moe_ep"].map((name) => spec(name, name, on("experts"))));
  specs.push(attn_cp > moe_dp ? spec("moe_dp", "attn_cp", on("attention")) : spec("moe_dp", "moe_dp", on("experts")));
  if (axisSize("dcp", dcp) > 1) {
    mesh = mesh.withView("decode", view({ dcp, dtp: divided(tp, dcp, "tp", "dcp") }), ["pp"]);
    specs.push(spec("dcp", "dcp", on("decode")));
  }
  if (shared_experts_tp !== undefined) {
    const width = axisSize("shared_experts_tp", shared_experts_tp);
    const levels = [width, divided(attnTp, width, "attn_tp", "shared_experts_tp")];
    specs.push(
      spec("shared_experts_tp", "attn_tp", {
        view: "attention",
        levels,
        level: 0,
      }),
    );
  }
  return new Plan(mesh, specs, world);
}
