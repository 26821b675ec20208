import * as formula from "./formula";
import { App } from "./page/app";
import { given } from "./page/given";

const app = new App(given(), document.getElementById("app")!);

// For a console, and for tests.
Object.assign(globalThis, { rankmesh: { ...formula, app } });
