/** The formula as the page offers it to a console and to tests: `rankmesh.read("tp=2,dp=4").of(5)`. */
export { Cluster } from "./cluster";
export { communicators, useText } from "./communicators";
export { crossings } from "./crossings";
export { difference } from "./difference";
export { Plan } from "./plan";
export { PRESETS, RECIPES, read } from "./source";
export { RankmeshError } from "./messages";
