"use strict";
(() => {
  const root = document.documentElement;
  const KEPT = "oelm-sorted";
  const QUIET_MS = 10000; // a reader who types or selects is not interrupted
  let isPaused = false;
  let usedAt = -Infinity;
  let updatedAt = 1000 * Number(root.dataset.updated);
  const every = () => 1000 * Number(root.dataset.every);

  // Which column of which table is sorted: [section, table, column, clicks].
  function sorted(scope) {
    const found = [];
    for (const section of scope.matches?.("section") ? [scope] : scope.querySelectorAll("section")) {
      [...section.querySelectorAll("table")].forEach((table, place) => {
        [...table.tHead.rows[0].cells].forEach((cell, column) => {
          const clicks = { ascending: 1, descending: 2 }[cell.getAttribute("aria-sort")];
          if (clicks) found.push([section.id, place, column, clicks]);
        });
      });
    }
    return found;
  }

  function sortAgain(kept) {
    for (const [id, place, column, clicks] of kept) {
      const table = document.getElementById(id)?.querySelectorAll("table")[place];
      const button = table?.tHead.rows[0].cells[column]?.querySelector("button");
      for (let click = 0; button && click < clicks; click++) button.click();
    }
  }

  const stops = (section) => [...section.querySelectorAll("a, button, [tabindex='0']")];

  function replace(section, next) {
    const kept = sorted(section);
    const stop = stops(section).indexOf(document.activeElement);
    const places = [...section.querySelectorAll(".scroll")].map((box) => [box.scrollLeft, box.scrollTop]);
    section.replaceWith(next);
    next.dispatchEvent(new CustomEvent("replaced", { bubbles: true }));
    sortAgain(kept);
    [...next.querySelectorAll(".scroll")].forEach((box, place) => box.scrollTo(...(places[place] ?? [0, 0])));
    if (stop >= 0) stops(next)[stop]?.focus({ preventScroll: true });
  }

  const parsed = (text) => new DOMParser().parseFromString(text, "text/html");

  async function ask(name) {
    const answer = await fetch(name, { cache: "no-store" });
    if (!answer.ok) throw new Error(String(answer.status));
    return answer;
  }

  const known = new Map(root.dataset.parts.split(" ").map((part) => part.split("=")));

  async function takeParts() {
    const news = await (await ask("parts")).json();
    const ids = Object.keys(news.parts);
    const here = [...document.querySelectorAll("main > section")].map((section) => section.id);
    if (ids.join() !== here.join()) return location.reload(); // another list of contents
    for (const id of ids) {
      if (known.get(id) === news.parts[id]) continue;
      const next = parsed(await (await ask(id)).text()).querySelector("section");
      replace(document.getElementById(id), document.adoptNode(next));
      known.set(id, news.parts[id]);
    }
    document.querySelector(".subtitle").textContent = news.subtitle;
    root.dataset.every = news.every;
    updatedAt = Date.now() - 1000 * news.age;
    if (news.over) location.reload();
  }

  function reload() {
    try {
      sessionStorage.setItem(KEPT, JSON.stringify(sorted(document)));
    } catch {
      // A browser may refuse storage to files; tables are then in their first order again.
    }
    location.reload(); // the browser keeps the place that the reader has scrolled to
  }

  function tellSilence() {
    const seconds = Math.round((Date.now() - updatedAt) / 1000);
    const isSilent = seconds > (3 * every()) / 1000 + 10;
    const place = document.getElementById("silence");
    place.textContent = isSilent ? place.dataset.text.replace("{seconds}", seconds) : "";
  }

  async function turn() {
    const isBusy = Date.now() - usedAt < QUIET_MS || String(getSelection()) !== "";
    try {
      if (!isPaused && !document.hidden) {
        if (root.dataset.live === "server") await takeParts();
        else if (!isBusy) return reload();
      }
    } catch {
      // The server has ended or the line is down: the page says how old it is, and asks again.
    }
    tellSilence();
    setTimeout(turn, every());
  }

  document.addEventListener("DOMContentLoaded", () => {
    if (root.dataset.live === "over") return;
    const button = document.getElementById("pause");
    button.hidden = false;
    button.addEventListener("click", () => {
      isPaused = !isPaused;
      button.setAttribute("aria-pressed", String(isPaused));
    });
    for (const kind of ["keydown", "pointerdown"]) addEventListener(kind, () => (usedAt = Date.now()));
    try {
      sortAgain(JSON.parse(sessionStorage.getItem(KEPT)) ?? []);
    } catch {
      // No storage, or nothing in it.
    }
    tellSilence();
    setTimeout(turn, every());
  });
})();
