import { mount } from "svelte";

import App from "./App.svelte";
import { language } from "./lib/language.svelte";
import { theme } from "./lib/theme.svelte";
import "./styles/tokens.css";
import "./styles/base.css";

const target = document.getElementById("app");
if (!target) throw new Error("the page has no #app");
theme.start();
void language.start().then(() => mount(App, { target }));
