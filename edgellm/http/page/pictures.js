// Pictures of a question: from files, the clipboard, or the camera.

import { made } from "./text.js";

/** Formats that the server reads, and bytes up to which a picture is sent as it is; a larger one is made smaller. */
const FORMATS = ["image/png", "image/jpeg", "image/webp"];
const MOST_BYTES = 4 << 20;
const LONGEST_SIDE = 2048;

/** A picture in a file as a data URL. Throws where the browser finds none. */
export async function dataURL(file) {
  const bitmap = await createImageBitmap(file);
  if (!FORMATS.includes(file.type) || file.size > MOST_BYTES) return drawn(bitmap, bitmap.width, bitmap.height);
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}

/** A picture as a JPEG of at most LONGEST_SIDE pixels a side. */
function drawn(source, width, height) {
  const scale = Math.min(1, LONGEST_SIDE / Math.max(width, height));
  const canvas = made("canvas");
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.getContext("2d").drawImage(source, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.92);
}

const CAMERA_ERRORS = {
  NotFoundError: "No camera was found.",
  NotAllowedError: "The browser was not allowed to use the camera: its settings for this page say so.",
  NotReadableError: "The camera cannot be read: another program may be using it.",
};

/** Let `video` show what the camera sees. Throws what is to be said where it cannot be had. */
export async function openCamera(video) {
  if (!window.isSecureContext) {
    throw new Error(
      "Browsers give the camera only to pages from localhost or over https; this one came from " +
        `${location.origin}. Ask for it over https, or through a tunnel (ssh -L 8000:localhost:8000).`,
    );
  }
  if (!navigator.mediaDevices?.getUserMedia) throw new Error("This browser has no access to cameras.");
  try {
    const wanted = { facingMode: "environment", width: { ideal: 1280 } };
    video.srcObject = await navigator.mediaDevices.getUserMedia({ video: wanted });
  } catch (error) {
    throw new Error(CAMERA_ERRORS[error.name] ?? `The camera cannot be used: ${error.message}`);
  }
  video.play().catch(() => {}); // where it is closed before its first picture comes
}

export function closeCamera(video) {
  for (const track of video.srcObject?.getTracks() ?? []) track.stop();
  video.srcObject = null;
}

/** What the camera sees as a data URL; null before anything has come. */
export const cameraPicture = (video) => (video.videoWidth ? drawn(video, video.videoWidth, video.videoHeight) : null);
