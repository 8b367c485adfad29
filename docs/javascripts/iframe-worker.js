// A browser starts no worker from a file. There a hidden frame does what the worker of the search would.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(address) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.srcdoc =
        `<script>postMessage = data => parent.postMessage(data, "*")<\/script>` +
        `<script src="${new URL(address, document.baseURI).href}"><\/script>`
      this.ready = new Promise(resolve => frame.addEventListener("load", () => resolve(frame.contentWindow)))
      addEventListener("message", ({ data, source }) => {
        if (source === frame.contentWindow) {
          const event = new MessageEvent("message", { data })
          this.onmessage?.(event)
          this.dispatchEvent(event)
        }
      })
      document.body.append(frame)
    }
    postMessage(data) {
      this.ready.then(window => window.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {}
  }
