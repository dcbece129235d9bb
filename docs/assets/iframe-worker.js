/* A worker for pages that a browser opens from the file system, where `new Worker(url)` is refused: the script runs
   in a hidden frame. The search sends messages and nothing else; it looks for the name `IFrameWorker`. */
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      // A document of its own, and not about:blank, which Firefox replaces when it has loaded.
      this.frame.srcdoc = "<!doctype html><title>search</title>"
      this.frame.onload = () => this.start(url)
      document.documentElement.appendChild(this.frame)
    }

    start(url) {
      this.scope = this.frame.contentWindow
      this.scope.postMessage = data => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        if (this.onmessage) this.onmessage(event)
      }
      const script = this.scope.document.createElement("script")
      script.src = url
      script.onload = () => {
        const waiting = this.waiting
        this.waiting = null
        waiting.forEach(data => this.postMessage(data))
      }
      this.scope.document.body.appendChild(script)
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data)
      else this.scope.dispatchEvent(new MessageEvent("message", { data }))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
