import js from "@eslint/js";
import tseslint from "typescript-eslint";

export default tseslint.config(
  { ignores: ["node_modules"] },
  js.configs.recommended,
  {
    files: ["src/**/*.ts"],
    extends: [...tseslint.configs.strictTypeChecked, ...tseslint.configs.stylisticTypeChecked],
    languageOptions: {
      parserOptions: {
        projectService: true,
        tsconfigRootDir: import.meta.dirname,
      },
    },
    rules: {
      // A listener is one call, whose answer nobody waits for.
      "@typescript-eslint/no-confusing-void-expression": ["error", { ignoreArrowShorthand: true }],
      // Sizes and ranks are numbers, and are written as such.
      "@typescript-eslint/restrict-template-expressions": ["error", { allowNumber: true }],
      // Indices come from the sizes of what they index; a check of each would hide the arithmetic.
      "@typescript-eslint/no-non-null-assertion": "off",
    },
  },
  {
    files: ["build.mjs"],
    languageOptions: { globals: { URL: "readonly", console: "readonly" } },
  },
);
