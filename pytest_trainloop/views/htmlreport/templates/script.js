"use strict";
(() => {
  const root = document.documentElement;
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  for (const tool of all("[data-script]")) tool.hidden = false;

  const theme = document.getElementById("theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const name = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
  theme.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; name(); });
  dark.addEventListener("change", name);
  name();

  const folds = document.getElementById("folds");
  folds.addEventListener("click", () => {
    const open = folds.getAttribute("aria-pressed") !== "true";
    for (const fold of all("main details")) fold.open = open;
    folds.setAttribute("aria-pressed", String(open));
    folds.textContent = open ? "Close all" : "Open all";
  });

  // On a phone the list of loops and the cards of failing ones are folded, so that what to repair comes first.
  if (matchMedia("(min-width: 64rem)").matches) document.getElementById("contents").open = true;
  if (!matchMedia("(min-width: 48rem)").matches) for (const card of all(".failed > .facts")) card.open = false;

  const reveal = () => {
    let place = null;
    try { place = location.hash.length > 1 ? document.getElementById(decodeURIComponent(location.hash.slice(1))) : null; }
    catch { return; }
    for (let at = place; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
    if (place) place.scrollIntoView();
  };
  addEventListener("hashchange", reveal);
  for (const link of all('a[href^="#"]')) {
    link.addEventListener("click", () => { if (link.hash === location.hash) reveal(); });
  }
  reveal();

  const search = document.getElementById("search");
  const texts = new Map();
  const textOf = (loop) => {
    if (!texts.has(loop)) texts.set(loop, loop.textContent.toLowerCase());
    return texts.get(loop);
  };
  search.addEventListener("input", () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const loop of all("main > .loop")) {
      loop.hidden = !words.every((word) => textOf(loop).includes(word));
      shown += !loop.hidden;
    }
    for (const entry of all("[data-loop]")) {
      entry.hidden = entry.dataset.loop.split(" ").every((id) => document.getElementById(id).hidden);
    }
    document.getElementById("none").hidden = shown > 0;
    document.getElementById("found").textContent = words.length ? `${shown} found` : "";
  });
})();
