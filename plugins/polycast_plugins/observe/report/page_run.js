// A slider, or the pointer over a chart, chooses a step, whose numbers each chart then shows.
const slider = document.getElementById("at");
if (slider) {
  const steps = data.steps.map(([step]) => step);
  const [first, last] = [steps[0], steps[steps.length - 1]];
  const charts = [...document.querySelectorAll(".chart")];
  slider.max = steps.length - 1;
  slider.value = steps.length - 1;

  const show = (at) => {
    const [step, ...runs] = data.steps[at];
    const x = last > first ? (1000 * (step - first)) / (last - first) : 500;
    document.getElementById("at-step").textContent = step.toLocaleString("en-US");
    slider.setAttribute("aria-valuetext", `step ${step}`);
    for (const chart of charts) {
      const number = data.charts.indexOf(chart.dataset.chart);
      const cursor = chart.querySelector(".cursor");
      cursor.setAttribute("d", `M${x} 0V100`);
      cursor.setAttribute("visibility", "visible");
      const here = chart.querySelector(".here");
      const texts = runs.flatMap((of, i) => {
        const text = document.createElement("span");
        if (runs.length > 1) text.className = NAMES[i];
        text.textContent = of[number] || "not recorded";
        return [text, " "];
      });
      here.replaceChildren(`step ${step.toLocaleString("en-US")}: `, ...texts);
      here.hidden = false;
      chart.querySelector(".values").hidden = true;
    }
  };
  slider.addEventListener("input", () => show(Number(slider.value)));
  for (const chart of charts) {
    const plot = chart.querySelector(".plot svg");
    const follow = (event) => {
      const box = plot.getBoundingClientRect();
      const wanted = first + ((last - first) * (event.clientX - box.left)) / box.width;
      let at = 0;
      steps.forEach((step, i) => {
        if (Math.abs(step - wanted) < Math.abs(steps[at] - wanted)) at = i;
      });
      slider.value = at;
      show(at);
    };
    plot.addEventListener("pointermove", follow);
    plot.addEventListener("pointerdown", follow);
  }
}
