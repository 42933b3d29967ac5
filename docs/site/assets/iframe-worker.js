// The theme searches in a Worker, which no browser starts for a page that was opened as a file. This runs the
// worker's script in a hidden frame instead; pages that come from a server are left as they are.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.element = document.createElement("iframe")
      this.element.hidden = true
      document.body.append(this.element)
      const frame = this.element.contentWindow
      const send = `<script>postMessage = (data) => parent.postMessage(data, "*")</script>`
      frame.document.open()
      frame.document.write(`${send}<script src="${url}"></script>`)
      frame.document.close()
      // Only now: opening the document has removed what listened before.
      this.ready = new Promise((resolve) => frame.addEventListener("load", resolve))
      window.addEventListener("message", (event) => {
        if (event.source === frame) this.dispatchEvent(new MessageEvent("message", { data: event.data }))
      })
    }

    async postMessage(data) {
      await this.ready
      this.element.contentWindow.dispatchEvent(new MessageEvent("message", { data }))
    }

    terminate() {
      this.element.remove()
    }
  }
}
