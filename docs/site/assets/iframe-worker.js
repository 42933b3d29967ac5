// The theme searches in a Worker, which no browser starts for a page that was opened as a file. This runs the script
// of the worker in a hidden frame instead; pages that a server delivers are left as they are.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const frame = this.frame.contentWindow
      this.ready = new Promise((resolve) => (frame.addEventListener("load", resolve)))
      frame.document.open()
      frame.document.write(
        `<script>postMessage = (data) => parent.postMessage(data, "*")</script><script src="${url}"></script>`,
      )
      frame.document.close()
      window.addEventListener("message", (event) => {
        if (event.source === frame) this.dispatchEvent(new MessageEvent("message", { data: event.data }))
      })
    }

    async postMessage(data) {
      await this.ready
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
