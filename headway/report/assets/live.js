/* ---- following a run ------------------------------------------------------------------------------------------ */

  const live = byId("live-link");
  const link = (state, said) => { live.dataset.link = state; live.textContent = said; };
  const source = new EventSource("events?page=" + encodeURIComponent(data.live));
  source.addEventListener("open", () => link("open", "live"));
  source.addEventListener("error", () => link("lost", "connection lost, trying again"));
  // Parts of the page as the server wrote them: the element of that id is replaced, unless nothing in it changed.
  const shown = {};
  source.addEventListener("parts", (event) => {
    for (const [id, markup] of Object.entries(JSON.parse(event.data))) {
      const old = byId(id);
      if (old && markup && shown[id] !== markup) { old.outerHTML = markup; shown[id] = markup; }
    }
    root.dataset.parts = event.lastEventId;
  });
  source.addEventListener("charts", (event) => {
    const { leads, ...charts } = JSON.parse(event.data);
    for (const [name, chart] of Object.entries(charts)) {
      if (!chart || !follow[name]) continue;
      follow[name](chart);
      byId(name).querySelector(".lead").textContent = leads[name];
    }
    root.dataset.charts = event.lastEventId;
  });
  // The page's sections are others now, or the run has ended: the server has another page at the same address.
  source.addEventListener("reload", () => { source.close(); location.reload(); });
  source.addEventListener("bye", () => { source.close(); link("lost", "no longer watched"); });
