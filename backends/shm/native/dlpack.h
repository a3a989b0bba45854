// The part of the DLPack ABI, version 1, that passes tensors to and from C without Python in between.
#pragma once
#include <cstdint>

namespace dlpack {

constexpr uint32_t kMajor = 1;
constexpr int32_t kCpu = 1;
enum Code : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4 };

struct Version {
    uint32_t major, minor;
};
struct Device {
    int32_t type, id;
};
struct DataType {
    uint8_t code, bits;
    uint16_t lanes;
};
struct Tensor {
    void* data;
    Device device;
    int32_t ndim;
    DataType dtype;
    int64_t* shape;
    int64_t* strides;
    uint64_t byte_offset;
};
struct ManagedTensor {
    Version version;
    void* context;
    void (*deleter)(ManagedTensor*);
    uint64_t flags;
    Tensor tensor;
};
struct ExchangeApiHeader {
    Version version;
    ExchangeApiHeader* previous;
};
struct ExchangeApi {
    ExchangeApiHeader header;
    void* allocate;
    void* from_object;
    int (*to_object)(ManagedTensor*, void** out);
    int (*borrow)(void* object, Tensor* out);
    void* current_stream;
};

}  // namespace dlpack
