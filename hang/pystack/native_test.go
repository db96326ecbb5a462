package pystack

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestDemangle(t *testing.T) {
	for _, c := range [][2]string{
		{"poll", "poll"},
		{"_ZN4c10d7Reducer17finalize_backwardEv", "c10d::Reducer::finalize_backward"},
		{"_ZNK4c10d16ProcessGroupGloo7runLoopEi", "c10d::ProcessGroupGloo::runLoop"},
		{"_ZN2at10TensorBaseD2Ev", "at::TensorBase::~TensorBase"},
		{"_ZN3c1010TensorImplC1EOS0_", "c10::TensorImpl::TensorImpl"},
		{"_Znwm", "operator new"},
		{"_ZSt4moveIRiEONSt16remove_referenceIT_E4typeEOS2_", "std::move"},
		{"_ZNSt6vectorIiSaIiEE9push_backEOi", "std::vector::push_back"},
		{"_ZNSt6vectorIN2at6TensorESaIS1_EEC2ERKS3_", "std::vector::vector"},
		{"_ZZN3foo3barEvENKUlvE_clEv", "foo::bar()::{lambda()#1}::operator()"},
		{"_ZN12_GLOBAL__N_13fooEv", "(anonymous namespace)::foo"},
		{"_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEE6appendEPKcm", "std::__cxx11::basic_string::append"},
		{"_ZN2at6native12_GLOBAL__N_14sumsILb1ELi42EEEvv", "at::native::(anonymous namespace)::sums"},
		{"_ZNKSt8functionIFvvEEclEv", "std::function::operator()"},
		{"_ZN3abcB5cxx113defEv", "abc::def"},
		{"_ZN3fo", "_ZN3fo"},
		{"_ZNS_1aE", "_ZNS_1aE"},
		{"_Z", "_Z"},
	} {
		require.Equal(t, c[1], demangle(c[0]), c[0])
	}
}

func TestEndsInCall(t *testing.T) {
	for _, c := range []struct {
		arch string
		code []byte
		want bool
	}{
		{"amd64", []byte{0, 0, 0, 0xe8, 1, 2, 3, 4}, true},         // call +distance
		{"amd64", []byte{0, 0, 0, 0, 0, 0, 0xff, 0xd0}, true},      // call *%rax
		{"amd64", []byte{0, 0, 0, 0, 0, 0x41, 0xff, 0xd4}, true},   // call *%r12
		{"amd64", []byte{0, 0, 0xff, 0x15, 1, 2, 3, 4}, true},      // call *distance(%rip)
		{"amd64", []byte{0, 0, 0, 0, 0, 0xff, 0x50, 0x18}, true},   // call *0x18(%rax)
		{"amd64", []byte{0, 0, 0, 0, 0xff, 0x54, 0x24, 0x8}, true}, // call *8(%rsp)
		{"amd64", []byte{0, 0, 0, 0, 0, 0xff, 0x14, 0xc5}, true},   // call *(%rbp,%rax,8)
		{"amd64", []byte{0, 0xff, 0x94, 0x24, 1, 2, 3, 4}, true},   // call *distance(%rsp)
		{"amd64", []byte{0, 0, 0, 0, 0, 0, 0xff, 0xe0}, false},     // jmp *%rax
		{"amd64", []byte{0, 0, 0, 0, 0, 0, 0xff, 0x50}, false},     // cut short
		{"amd64", []byte{0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90}, false},
		{"arm64", []byte{0, 0, 0, 0, 0x10, 0, 0, 0x94}, true},        // bl
		{"arm64", []byte{0, 0, 0, 0, 0x20, 0, 0x3f, 0xd6}, true},     // blr x1
		{"arm64", []byte{0, 0, 0, 0, 0xc0, 0x03, 0x5f, 0xd6}, false}, // ret
		{"riscv64", []byte{0, 0, 0, 0xe8, 1, 2, 3, 4}, false},
	} {
		require.Equal(t, c.want, endsInCall(c.arch, c.code), "%s % x", c.arch, c.code)
	}
}

func TestParseSyscall(t *testing.T) {
	sp, pc, ok := parseSyscall("202 0x1 0x2 0x0 0x0 0x0 0x0 0x7ffc10 0x7f1020\n")
	require.True(t, ok)
	require.Equal(t, uint64(0x7ffc10), sp)
	require.Equal(t, uint64(0x7f1020), pc)
	sp, _, ok = parseSyscall("-1 0x7ffc10 0x7f1020\n")
	require.True(t, ok)
	require.Equal(t, uint64(0x7ffc10), sp)
	for _, s := range []string{"running\n", "", "0 0x0 0x0\n"} {
		_, _, ok = parseSyscall(s)
		require.False(t, ok, s)
	}
}

func TestParseMapping(t *testing.T) {
	m, ok := parseMapping("7f00-7f10 r-xp 00001000 08:01 42                         /a b/libpython3.so (deleted)")
	require.True(t, ok)
	require.Equal(t, mapping{start: 0x7f00, end: 0x7f10, offset: 0x1000, inode: 42, exec: true,
		path: "/a b/libpython3.so (deleted)"}, m)
	m, ok = parseMapping("7f00-7f10 rw-p 00000000 00:00 0 ")
	require.True(t, ok)
	require.Empty(t, m.path)
	_, ok = parseMapping("7f10-7f00 rw-p 00000000 00:00 0 ")
	require.False(t, ok)
}
