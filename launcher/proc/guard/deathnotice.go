package guard

import (
	"syscall"
	"time"
	"unsafe"
)

// DeathNotice is sent by guard or launcher when the other one was killed: a request, and its TCP address. It is sent
// once, best effort: nothing depends on it.
type DeathNotice struct {
	// IP has 4 or 16 bytes; Zone is the index of the interface of a link-local IPv6 address, else 0.
	IP   []byte
	Zone uint32
	Port uint16
	// Request is sent as it is, and any answer taken for a receipt. Without one no notice is sent.
	Request []byte
}

// noticeTime bounds a notice: the launcher's remaining processes are killed only then.
const noticeTime = 200 * time.Millisecond

// The page behind the shared state has the death notice: one byte that is 4 or 6 for the kind of address, port, zone,
// address, the length of the request, and the request. Its first byte distinguishes it from the arguments, which were
// there before.
const (
	noticeHead = 1 + 2 + 4 + 16 + 2
	maxNotice  = stateSize - noticeHead
)

// SetDeathNotice replaces the notice; a Request that is empty, or has more than 4 KiB or so, disables it.
func (l *Link) SetDeathNotice(f DeathNotice) { writeNotice(l.state, f) }

// SendDeathNotice sends the notice for a guard that was killed. It takes 200 ms at most.
func (l *Link) SendDeathNotice() { sendNotice(readNotice(l.state)) }

func writeNotice(fd int, f DeathNotice) {
	page := make([]byte, stateSize)
	if n := len(f.Request); n > 0 && n <= maxNotice && (len(f.IP) == 4 || len(f.IP) == 16) {
		page[0] = 4
		if len(f.IP) == 16 {
			page[0] = 6
		}
		page[1], page[2] = byte(f.Port>>8), byte(f.Port)
		page[3], page[4], page[5], page[6] = byte(f.Zone>>24), byte(f.Zone>>16), byte(f.Zone>>8), byte(f.Zone)
		copy(page[7:], f.IP)
		page[23], page[24] = byte(n>>8), byte(n)
		copy(page[noticeHead:], f.Request)
	}
	_, _ = syscall.Pwrite(fd, page, stateSize) // without room there is no death notice
}

func readNotice(fd int) (f DeathNotice) {
	page := make([]byte, stateSize)
	if n, _ := syscall.Pread(fd, page, stateSize); n < stateSize {
		return f
	}
	return parseNotice(page)
}

// parseNotice reads a page of stateSize bytes.
func parseNotice(page []byte) (f DeathNotice) {
	n := int(page[23])<<8 | int(page[24])
	if page[0] != 4 && page[0] != 6 || n == 0 || n > maxNotice {
		return f
	}
	f.IP = page[7:11]
	if page[0] == 6 {
		f.IP = page[7:23]
	}
	f.Port = uint16(page[1])<<8 | uint16(page[2])
	f.Zone = uint32(page[3])<<24 | uint32(page[4])<<16 | uint32(page[5])<<8 | uint32(page[6])
	f.Request = page[noticeHead : noticeHead+n]
	return f
}

// sendNotice connects, sends and waits for the first byte of the answer: a pod's network may end with the guard, and
// data that was not received by then is lost.
func sendNotice(f DeathNotice) {
	if len(f.Request) == 0 {
		return
	}
	family, to := f.sockaddr()
	fd, err := syscall.Socket(family, syscall.SOCK_STREAM|syscall.SOCK_NONBLOCK|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer syscall.Close(fd)
	deadline := time.Now().Add(noticeTime)
	if err = syscall.Connect(fd, to); err == syscall.EINPROGRESS && await(fd, pollOut, deadline) {
		err = nil // or it shows when writing
	}
	if err != nil {
		return
	}
	if _, err = syscall.Write(fd, f.Request); err == nil { // at one go, into an empty buffer
		await(fd, pollIn, deadline)
	}
}

func (f *DeathNotice) sockaddr() (family int, to syscall.Sockaddr) {
	if len(f.IP) == 4 {
		return syscall.AF_INET, &syscall.SockaddrInet4{Port: int(f.Port), Addr: [4]byte(f.IP)}
	}
	return syscall.AF_INET6, &syscall.SockaddrInet6{Port: int(f.Port), ZoneId: f.Zone, Addr: [16]byte(f.IP)}
}

// Events of poll(2), which package syscall lacks.
const (
	pollIn  = 1
	pollOut = 4
)

// await reports whether fd is ready, or broken, by the deadline.
func await(fd int, event int16, deadline time.Time) bool {
	for {
		left := syscall.NsecToTimespec(max(0, int64(time.Until(deadline))))
		p := struct {
			fd              int32
			events, revents int16
		}{int32(fd), event, 0}
		n, _, errno := syscall.Syscall6(syscall.SYS_PPOLL, uintptr(unsafe.Pointer(&p)), 1, uintptr(unsafe.Pointer(&left)),
			0, 0, 0)
		if errno != syscall.EINTR {
			return errno == 0 && n > 0
		}
	}
}
