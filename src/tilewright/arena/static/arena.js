// Follow the states of a submission by server-sent events, and load the evidence when a job has finished.
"use strict";
const live = document.getElementById("live");
if (live && live.dataset.watch) {
  const source = new EventSource(live.dataset.watch);
  source.onmessage = (event) => {
    let finished = false;
    for (const job of JSON.parse(event.data)) {
      const list = [...document.querySelectorAll(".states")].find((one) => one.dataset.board === job.board);
      if (!list || list.querySelector(".now.ranked, .now.refused")) continue;
      finished ||= job.state === "ranked" || job.state === "refused";
      for (const item of list.children) item.classList.toggle("now", item.classList.contains(job.state));
      const ahead = list.querySelector(".ahead");
      if (ahead) ahead.textContent = job.state === "queued" ? ` ${job.ahead} ahead` : "";
    }
    if (finished) {
      source.close();
      location.reload();
    }
  };
}
