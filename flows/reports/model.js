"use strict";
// Draws each chart with plotly, over steps, tokens or minutes.
const { charts } = JSON.parse(document.getElementById("series").textContent);
const places = [...document.querySelectorAll(".chart")]; // in the same order
const palette = ["#2563eb", "#e8590c", "#2b8a3e", "#ae3ec9", "#c92a2a", "#0b7285", "#f08c00", "#5f3dc4"];

function draw() {
  const axis = document.querySelector('input[name="axis"]:checked').value;
  const style = getComputedStyle(document.documentElement);
  const ink = getComputedStyle(document.body).color;
  const line = matchMedia("(prefers-color-scheme: dark)").matches && !matchMedia("print").matches ? "#30353d" : "#dde1e6";
  for (const [place, chart] of charts.entries()) {
    const traces = chart.traces.map((trace, number) => ({
      name: trace.name,
      x: trace[axis] || trace.step,
      y: trace.values,
      mode: trace.values.length < 40 ? "lines+markers" : "lines",
      line: { color: palette[number % palette.length], width: 1.8 },
      marker: { size: 5 },
    }));
    // Room for the lines of the legend, whose columns are as wide as the longest name.
    const column = 60 + 7 * Math.max(...traces.map((trace) => trace.name.length));
    const lines = Math.ceil(traces.length / Math.max(1, Math.floor(places[place].clientWidth / column)));
    places[place].style.height = `${240 + 20 * lines}px`;
    const axes = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true };
    const layout = {
      margin: { l: 10, r: 10, t: 8, b: 10 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: style.getPropertyValue("--sans"), size: 12, color: ink },
      showlegend: traces.length > 1,
      legend: { orientation: "h", x: 0, y: 0, yref: "container", yanchor: "bottom" },
      xaxis: { ...axes, title: { text: axis, standoff: 6 } },
      yaxis: { ...axes },
      hovermode: "x unified",
    };
    Plotly.react(places[place], traces, layout, { responsive: true, displaylogo: false, displayModeBar: false });
  }
}

for (const choice of document.querySelectorAll('input[name="axis"]')) choice.addEventListener("change", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
