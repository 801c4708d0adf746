import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vite";

// The wheel ships what is built; `fedloop serve` serves it under a content security policy without inline scripts or styles.
export default defineConfig({
  plugins: [svelte()],
  base: "/",
  build: {
    outDir: "../coordinator/console",
    emptyOutDir: true,
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
  },
});
