// Sources -> one page: script, style and licences inlined, and the hash of the sources by which a test sees it is stale.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { build } from "esbuild";

const here = new URL("./", import.meta.url);
const read = (path) => readFileSync(new URL(path, here), "utf8");
const target = "../src/rankmesh/viz/explorer.html";

/** The SHA-256 of the sources: each file's path and text, in the order of the paths. */
function sources() {
  const inside = readdirSync(new URL("src", here), {
    recursive: true,
    withFileTypes: true,
  })
    .filter((entry) => entry.isFile())
    .map((entry) => `${entry.parentPath}/${entry.name}`.slice(new URL(".", here).pathname.length));
  const files = [...inside, "build.mjs", "package-lock.json", "../src/rankmesh/core/presets.json"].sort();
  const hash = createHash("sha256");
  for (const file of files) hash.update(`${file}\n${read(file)}\n`);
  return hash.digest("hex");
}

async function bundled(entry, loader = {}) {
  const made = await build({
    entryPoints: [new URL(entry, here).pathname],
    bundle: true,
    minify: true,
    write: false,
    format: "iife",
    target: "es2022",
    charset: "utf8",
    legalComments: "none",
    metafile: true,
    loader,
  });
  return {
    text: made.outputFiles[0].text.trim(),
    inputs: Object.keys(made.metafile.inputs),
  };
}

/** The licence of each library whose code is in the page. */
function licences(inputs) {
  const names = inputs.map((path) => /node_modules\/((?:@[^/]+\/)?[^/]+)\//.exec(path)?.[1]).filter(Boolean);
  return [...new Set(names)].sort().map((name) => {
    const { version } = JSON.parse(read(`node_modules/${name}/package.json`));
    return `${name} ${version}\n\n${read(`node_modules/${name}/LICENSE`).trim()}`;
  });
}

const script = await bundled("src/main.ts");
const style = await bundled("src/page.css");
const parts = {
  SOURCES: sources(),
  LICENCES: licences(script.inputs).join("\n\n---\n\n").replaceAll("--", "- -"),
  STYLE: style.text,
  SCRIPT: script.text.replaceAll("</script", "<\\/script"),
};
const page = read("src/page.html").replace(/\{\{([A-Z]+)\}\}/g, (_, name) => parts[name]);
writeFileSync(new URL(target, here), page);
console.log(`wrote src/rankmesh/viz/explorer.html, ${Math.round(page.length / 1024)} KiB`);
