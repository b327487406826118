/* Reading XLA's call frame: arguments, results, attributes, errors. */
#ifndef AGALITE_FRAME_H
#define AGALITE_FRAME_H

#include <string.h>

#include "xla/ffi/api/c_api.h"

static inline XLA_FFI_Buffer *argument(const XLA_FFI_CallFrame *frame, int i) {
  return (XLA_FFI_Buffer *)frame->args.args[i];
}

static inline XLA_FFI_Buffer *result(const XLA_FFI_CallFrame *frame, int i) {
  return (XLA_FFI_Buffer *)frame->rets.rets[i];
}

static inline const void *attribute(const XLA_FFI_CallFrame *frame, const char *name) {
  for (int64_t i = 0; i < frame->attrs.size; i++) {
    const XLA_FFI_ByteSpan *span = frame->attrs.names[i];
    if (span->len != strlen(name) || memcmp(span->ptr, name, span->len)) continue;
    return frame->attrs.types[i] == XLA_FFI_AttrType_SCALAR
               ? ((XLA_FFI_Scalar *)frame->attrs.attrs[i])->value
               : frame->attrs.attrs[i];
  }
  return NULL;
}

static inline int64_t whole(const XLA_FFI_CallFrame *frame, const char *name) {
  const int64_t *value = attribute(frame, name);
  return value ? *value : 0;
}

static inline double number(const XLA_FFI_CallFrame *frame, const char *name) {
  const double *value = attribute(frame, name);
  return value ? *value : 0;
}

static inline XLA_FFI_Error *failure(const XLA_FFI_CallFrame *frame, const char *message) {
  XLA_FFI_Error_Create_Args args = {.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE,
                                    .message = message,
                                    .errc = XLA_FFI_Error_Code_INVALID_ARGUMENT};
  return frame->api->XLA_FFI_Error_Create(&args);
}

/* XLA asks every handler once which version of the interface it was built for. */
static inline int asks_for_version(const XLA_FFI_CallFrame *frame) {
  XLA_FFI_Extension_Base *extension = frame->extension_start;
  if (!extension || extension->type != XLA_FFI_Extension_Metadata) return 0;
  XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)extension)->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  return 1;
}

/* A handler that XLA calls, of the kernel of that name. */
#define HANDLER(name)                                                       \
  __attribute__((visibility("default"))) XLA_FFI_Error *agalite_##name(     \
      XLA_FFI_CallFrame *frame) {                                           \
    if (asks_for_version(frame)) return NULL;                               \
    if (argument(frame, 0)->dtype != REAL_TYPE)                             \
      return failure(frame, "agalite_" #name ": built for another type");   \
    return NAME(name)(frame);                                               \
  }

#endif
