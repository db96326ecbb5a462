//go:build cgo && linux

package nvml

import (
	"encoding/binary"
	"math"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// allLinks is the scope of a field that is summed over all links.
const allLinks = math.MaxUint32

// fields asks for several values at once; scope is a link, or allLinks. Values that the device does not have are
// missing.
func (d *device) fields(scope uint32, ids ...uint32) (map[uint32]uint64, error) {
	if err := d.usable("nvmlDeviceGetFieldValues"); err != nil {
		return nil, err
	}
	asked := make([]nvml.FieldValue, len(ids))
	for i, id := range ids {
		// A driver that does not know the field might leave its result alone.
		asked[i] = nvml.FieldValue{FieldId: id, ScopeId: scope, NvmlReturn: uint32(nvml.ERROR_NOT_SUPPORTED)}
	}
	if err := absent(d.handle.GetFieldValues(asked)); err != nil {
		return nil, err
	}
	values := map[uint32]uint64{}
	for _, v := range asked {
		if err := failure(nvml.Return(v.NvmlReturn)); isLost(err) {
			return nil, err
		}
		if n, ok := number(v); ok {
			values[v.FieldId] = n
		}
	}
	return values, nil
}

// number is the value of a field, and false when there is none, also where the driver writes all ones for that.
func number(v nvml.FieldValue) (uint64, bool) {
	if v.NvmlReturn != uint32(nvml.SUCCESS) {
		return 0, false
	}
	bits := binary.NativeEndian.Uint64(v.Value[:])
	switch nvml.ValueType(v.ValueType) {
	case nvml.VALUE_TYPE_UNSIGNED_INT:
		n := uint32(bits)
		return uint64(n), n != math.MaxUint32
	case nvml.VALUE_TYPE_SIGNED_INT:
		n := int32(bits)
		return uint64(n), n >= 0
	case nvml.VALUE_TYPE_UNSIGNED_SHORT:
		return bits & math.MaxUint16, true
	case nvml.VALUE_TYPE_DOUBLE:
		f := math.Float64frombits(bits)
		return uint64(f), f >= 0 && f < math.MaxInt64
	default:
		return bits, bits <= math.MaxInt64
	}
}
