// Health: a sign while the server, or its engine, does not answer. It is asked only while nothing is heard of it.
const EVERY_MS = 1000;
let asking = false;

// Asks until all is well; says each state by a "health" event: one of the engine's, or "unreachable".
export async function watchHealth() {
  if (asking) return;
  asking = true;
  for (let state = ""; !["ready", "sleeping"].includes(state);) {
    try { state = (await (await fetch("health")).json()).engine; } catch { state = "unreachable"; }
    dispatchEvent(new CustomEvent("health", { detail: state }));
    if (state !== "ready") await new Promise(done => setTimeout(done, EVERY_MS));
  }
  asking = false;
}
