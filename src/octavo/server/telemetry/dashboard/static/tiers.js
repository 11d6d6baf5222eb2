// The loads, saves and saved time of each tier of the KV cache. Shown if there is a tier outside the device.

import { bytes, count, duration, percent } from "./format.js";

export class TierTable {
  constructor(panel) {
    this.panel = panel;
    [this.body] = panel.querySelector("table").tBodies;
  }

  update(tiers) {
    this.panel.hidden = tiers.length < 2;
    while (this.body.rows.length > tiers.length) this.body.deleteRow(-1);
    tiers.forEach((tier, place) => this.fill(this.body.rows[place] ?? this.make(), tier));
  }

  make() {
    const row = this.body.insertRow();
    for (let column = 0; column < 9; column += 1) row.insertCell().className = column ? "number" : "";
    return row;
  }

  fill(row, tier) {
    const values = [
      tier.usable ? tier.name : `${tier.name} (left alone)`,
      percent(tier.hit_rate),
      tier.spared < 0 ? `−${duration(-tier.spared)}` : duration(tier.spared),
      bytes(tier.loaded || null),
      speed(tier.loads_per_s),
      bytes(tier.saved || null),
      speed(tier.saves_per_s),
      bytes(tier.holds),
      count(tier.evicted),
    ];
    values.forEach((value, i) => {
      if (row.cells[i].textContent !== value) row.cells[i].textContent = value;
    });
    row.cells[0].classList.toggle("error", !tier.usable);
  }
}

function speed(bytesPerSecond) {
  return bytesPerSecond === null ? "–" : `${bytes(Math.round(bytesPerSecond))}/s`;
}
