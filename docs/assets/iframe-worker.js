// The search runs in a worker. Browsers start no worker for a page that was opened from the disk: there, a hidden frame
// runs the worker's script instead.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.onmessage = this.onerror = this.onmessageerror = null;
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.frame = frame;
      this.script = new Promise((resolve, reject) => {
        frame.onload = () => {
          const inside = frame.contentWindow;
          inside.postMessage = (data) => this.onmessage?.({ data });
          const script = inside.document.createElement("script");
          script.src = new URL(url, location.href).href;
          script.onload = () => resolve(inside);
          script.onerror = reject;
          inside.document.body.append(script);
        };
      });
      this.script.catch((error) => this.onerror?.(error));
      document.body.append(frame);
    }

    postMessage(data) {
      this.script.then((inside) => inside.onmessage({ data: structuredClone(data) }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
